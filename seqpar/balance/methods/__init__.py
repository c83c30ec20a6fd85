"""Methods that assign documents to ranks.

Start with `greedy.py`, which contains most of the published methods. Zeppelin is in `zeppelin.py`.
The packings that trainers commonly use are in `baselines.py`.
"""
