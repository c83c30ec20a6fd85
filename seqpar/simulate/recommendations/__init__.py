"""Rank the ways to train a model on a cluster.

A *way* is a strategy with its layout and its division of the devices (`Recommendation`). Start with
`recommending.py`. `ways.py` lists the ways, `divisions.py` the divisions of devices, `searching.py`
simulates ways in the order of their lower bounds, and `predicting.py` simulates one way.
`recommendation.py` is the result.
"""
