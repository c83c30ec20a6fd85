"""Methods that assign documents to ranks.

Start with `greedy.py`, which has most of the published methods. `zeppelin.py` has another, and
`baselines.py` the usual packings.
"""
