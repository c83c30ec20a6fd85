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


def far_apart(operands, stride):
    """Return the same operands, (1, T, H, D) each, with rows so many elements apart."""
    strided = {}
    for name in ("q", "k", "v", "dout"):
        dense = getattr(operands, name)
        storage = dense.new_empty((dense.shape[1] - 1) * stride + dense[0, 0].numel())
        view = storage.as_strided(dense.shape, (0, stride, *dense.stride()[2:]))
        strided[name] = view.copy_(dense)
    return dataclasses.replace(operands, **strided)


TRITON_REFUSES = [  # dtype, (D, Dv), whether there is the interpreter, and what the refusal says
    (torch.float64, (8, 8), True, "q must be bf16, fp16 or fp32"),
    (torch.float32, (257, 8), True, "q must have a head dim of at most 256"),
    (torch.float32, (8, 300), True, "v must have a head dim of at most 256"),
    (torch.float32, (8, 8), False, "q must be on a CUDA device"),
]
