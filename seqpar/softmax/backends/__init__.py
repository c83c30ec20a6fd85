"""Backends: modules that compute attention of some queries over one block of keys, on one rank.

`seqpar/softmax/attend.py` defines their interface and chooses a backend. Start with `reference.py`,
which is plain PyTorch. `aten.py` calls ATen's kernels. On CPUs, it calls a kernel once for each
piece that `pieces.py` cuts. `flash_attn.py` calls packages of FlashAttention. On CUDA, both use
`varlen.py`, which joins all documents into few calls. `triton.py` calls our own kernels.
"""
