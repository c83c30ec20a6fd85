"""Layers that need the few tokens before each token: short causal convolutions and token shifts.

The *halo* of a rank is the tokens of other ranks that it needs. Start with `functions.py`.
`rows.py` finds the rows to send, and `convolve.py` computes.
"""
