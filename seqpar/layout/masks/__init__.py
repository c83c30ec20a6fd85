"""Masks, their ranges, and the slices of a mask between two sets of tokens.

Start with `mask.py`, whose `slices_between` makes slices of the spans of two ranks. For masks that
are a band of positions, `slices_of_band.py` finds the rows that attend to each other.
"""
