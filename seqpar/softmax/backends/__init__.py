"""Backends, which compute softmax attention over slices on one rank.

Start with `reference.py`, which is plain PyTorch and has the interface of all. `choice.py` chooses
one. `aten.py` and `flash_attn.py` call fused kernels on the pieces that `pieces.py` cuts.
"""
