"""Compute short causal convolutions and token shifts over sharded tokens.

The result at a token depends on the token and on a few tokens before it, which can be on other
ranks. The *halo* of a rank is the tokens that the rank needs from other ranks. Start with
`functions.py`, which has the public functions. `rows.py` finds the rows that ranks send, and
`convolve.py` computes convolutions and their gradients.
"""
