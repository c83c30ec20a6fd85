"""Methods that assign documents to ranks.

Start with `greedy.py`, which has most of the published methods. `zeppelin.py` has one more
published method. `baselines.py` has the packings that trainers commonly use.
"""
