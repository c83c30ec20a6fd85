"""Layers that need the few tokens before each token: short causal convolutions and token shifts.

The *halo* of a rank is the tokens that the rank needs from other ranks. Start with `functions.py`,
which has the public functions. `rows.py` finds the rows that ranks send, and `convolve.py`
computes.
"""
