"""Masks, and the slices of a mask between the queries of one rank and the keys of another rank.

Start with `slices_between` in `mask.py`. `reach.py` counts the rows that ranks need from each
other. `slices_of_band.py` finds the slices of a mask that is a band of positions. `mask_ranges.py`
has masks that users give as lists.
"""
