"""Rank the ways to train a model on a cluster.

A *way* is one configuration for training: a strategy with a layout and a division of the devices
(`Recommendation`). Start with `recommending.py`.

* `ways.py` lists the ways, and `divisions.py` lists the divisions of the devices.
* `predicting.py` simulates one way.
* `searching.py` simulates ways in the order of their lower bounds.
* `recommendation.py` defines the result.
"""
