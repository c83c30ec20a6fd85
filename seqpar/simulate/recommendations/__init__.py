"""Rank the ways to train a model on a cluster.

Start with `recommending.py`. `ways.py` lists the ways, of divisions of the devices (`divisions.py`)
too, `searching.py` takes them in the order of their lower bounds, and `predicting.py` simulates
one. `recommendation.py` is the result.
"""
