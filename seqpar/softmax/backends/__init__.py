"""Backends: modules that compute attention of some queries over one block of keys, on one rank.

Start with `reference.py`, which is plain PyTorch. `aten.py` calls the kernels of PyTorch's library
ATen, and `flash_attn.py` calls packages of FlashAttention. `triton.py` calls our own kernels.
`seqpar/softmax/attend.py` chooses a backend.
"""
