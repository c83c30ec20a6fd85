"""Masks, which say which query attends to which key, and their slices for two ranks.

A *slice* is a range of query rows and a range of key rows of one document, with a range of allowed
distances between the positions of a query and a key. Start with `slices_between` in `mask.py`.
"""
