"""Layers that need the few tokens before each token: short causal convolutions and token shifts.

Start with `functions.py`. `rows.py` finds the rows that travel; `convolve.py` computes.
"""
