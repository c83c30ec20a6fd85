"""Backends, which compute softmax attention over slices on one rank.

Start with `choice.py`, which defines the interface and chooses one. `reference.py` is plain
PyTorch. `aten.py` and `flash_attn.py` call fused kernels on the pieces that `pieces.py` cuts.
"""
