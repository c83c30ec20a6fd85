"""A ranking of the ways to train a model on a cluster.

Start with `recommending.py`. `search_space.py` lists the candidates.
"""
