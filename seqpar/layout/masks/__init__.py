"""Masks, and the slices of a mask between the queries of one rank and the keys of another rank.

A *slice* is a range of query rows and a range of key rows of one document, with a range of allowed
distances between the positions of a query and a key. Start with `slices_between` in `mask.py`.
`reach.py` counts the rows that ranks need from each other. `slices_of_band.py` finds the slices of
a mask that allows a range of distances. `mask_ranges.py` has masks that users give as lists.
"""
