"""Backends: modules that compute linear attention over the spans of one rank, and the spans' maps.

Start with `reference.py`, against which every other backend is tested.
"""
