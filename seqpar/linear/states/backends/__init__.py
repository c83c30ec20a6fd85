"""Compute linear attention over spans, each backend in its own way.

Start with `reference.py`, against which every other backend is tested.
"""
