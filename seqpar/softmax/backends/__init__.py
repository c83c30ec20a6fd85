"""Backends: modules that compute attention of some queries over one block of keys, on one rank.

`seqpar/softmax/attend.py` defines the interface of backends and chooses a backend. Start with
`reference.py`, which is plain PyTorch. `aten.py` calls ATen's kernels. On CPUs, ATen's kernel
computes only certain rectangles, and `pieces.py` cuts the work into such rectangles.
`flash_attn.py` calls packages of FlashAttention. On CUDA, `aten.py` and `flash_attn.py` use
`varlen.py`, which computes many documents in one kernel call. `triton.py` calls our own kernels.
"""
