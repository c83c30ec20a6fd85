"""Operands in the form that fused kernels take.

Legend: D head dim (Dv of values); the last dim of every tensor here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.softmax.compute.call_options import CallOptions

_ALIGNMENT = 8  # elements of 2 bytes; kernels load 16 bytes at a time


def positive_scale(q: Tensor, options: CallOptions) -> tuple[Tensor, CallOptions, int]:
    """Return q and options with a positive scale that give the same scores, and the scale's sign.

    Fused kernels scale after masking: a scale of 0 would turn −∞ into NaN, and a negative one into
    +∞. dq of the new q, times the sign, is dq of q.
    """
    if options.scale > 0:
        return q, options, 1
    sign = -1 if options.scale else 0
    return q * sign, replace(options, scale=-options.scale or 1.0), sign


def joint_head_dim(q: Tensor, v: Tensor) -> int:
    """Return the least multiple of 8 that is at least D and Dv."""
    return -(-max(q.shape[-1], v.shape[-1]) // _ALIGNMENT) * _ALIGNMENT


def pad_heads(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def aligned_heads(x: Tensor, width: int) -> Tensor:
    """Return x with zeros up to a head dim, and a copy if a head begins at an unaligned address."""
    if x.shape[-1] < width:
        return pad_heads(x, width)
    steps = x.storage_offset(), *x.stride()[:-1]
    is_aligned = x.stride(-1) == 1 and not any(step % _ALIGNMENT for step in steps)
    # `contiguous` would return a contiguous x as it is.
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def with_column(x: Tensor, column: Tensor) -> Tensor:
    """Return x (…, D + 1) with one more column (…).

    Fused kernels take no gradient of lse. It is therefore added to dout·v: v gets a column of ones,
    dout a column of dlse, and out a column of zeros.
    """
    return torch.cat([x, column[..., None].to(x.dtype)], -1)
