"""Backends of the recurrent primitive, each in its file.

Start with `reference.py`, against which every other backend is tested.
"""
