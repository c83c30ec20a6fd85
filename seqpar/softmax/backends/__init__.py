"""Backends, which compute softmax attention over slices on one rank.

`seqpar/softmax/attend.py` defines their interface and chooses one. Start with `reference.py`, which
is plain PyTorch. `aten.py` and `flash_attn.py` call fused kernels on the pieces that `pieces.py`
cuts.
"""
