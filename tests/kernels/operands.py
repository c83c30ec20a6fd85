"""What the tests of both kernels share: how operands lie in memory, and which are refused."""

import dataclasses

import torch


def stored(x, layout):
    """Return the same numbers (B, T, H, D), with heads before tokens in memory ("bhtd"), or among
    NaN ("strided"), or as they are."""
    if layout == "bhtd":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    return x


def far_apart(operands, stride, dim=1):
    """Return the operands (1, T, H, D) with rows (dim 1) or heads (2) `stride` elements apart."""
    strided = {}
    for name in ("q", "k", "v", "dout"):
        dense = getattr(operands, name)
        strides = [0, *dense.stride()[1:]]
        strides[dim] = stride
        furthest = sum(s * (n - 1) for s, n in zip(strides, dense.shape, strict=True))
        view = dense.new_empty(furthest + 1).as_strided(dense.shape, strides)
        strided[name] = view.copy_(dense)
    return dataclasses.replace(operands, **strided)


TRITON_REFUSES = [  # dtype, (D, Dv), whether there is the interpreter, and what the refusal says
    (torch.float64, (8, 8), True, "q must be bf16, fp16 or fp32"),
    (torch.bfloat16, (8, 8), True, "q must be fp16 or fp32"),
    (torch.float32, (257, 8), True, "q must have a head dim of at most 256"),
    (torch.float32, (8, 300), True, "v must have a head dim of at most 256"),
    (torch.float32, (8, 8), False, "q must be on a CUDA device"),
]
