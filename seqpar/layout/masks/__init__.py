"""Which query attends to which key: masks, their ranges, and the slices that they give two sets of
tokens.

Start with `mask.py`. `band_intersection.py` finds the rows that two ranks' tokens have for each
other.
"""
