"""Masks, their ranges, and the slices of a mask between two sets of tokens.

Start with `mask.py`. `slices_of_band.py` finds the rows of two ranks that attend to each other.
"""
