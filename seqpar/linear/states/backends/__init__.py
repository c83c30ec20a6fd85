"""Backends: modules that compute linear attention over the spans of one rank, with constant decay.

Start with `reference.py`, against which every other backend is tested.
"""
