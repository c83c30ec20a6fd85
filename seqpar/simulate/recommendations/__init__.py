"""Rank the ways to train a model on a cluster.

Start with `recommending.py`. `search_space.py` lists the ways and `recommendation.py` is the
result.
"""
