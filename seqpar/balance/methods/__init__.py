"""Methods that assign documents to ranks.

Start with `greedy.py`, which has most of the published methods. `zeppelin.py` has one more
published method, and `baselines.py` the packings that trainers commonly use.
"""
