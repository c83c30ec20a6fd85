"""Masks, their ranges, and the slices of a mask between two sets of tokens.

Start with `mask.py`. `band_intersection.py` finds the rows of two ranks that attend to each other.
"""
