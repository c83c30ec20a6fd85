"""Backends of the recurrent primitive, one per file.

Start with `reference.py`, against which every other backend is tested.
"""
