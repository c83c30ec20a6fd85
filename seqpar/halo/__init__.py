"""Layers that need the few tokens before each token: short causal convolutions and token shifts.

Start with `functions.py`, which users call. `rows.py` finds the rows that travel, and `taps.py` and
`convolve.py` compute.
"""
