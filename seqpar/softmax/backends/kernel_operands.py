"""Operands in the form that fused kernels take.

Legend: D head dim (Dv of values); the last dim of every tensor here.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

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
    return q * sign, options._replace(scale=-options.scale or 1.0), sign


def joint_head_dim(q: Tensor, v: Tensor) -> int:
    """Return the least multiple of 8 that is at least D and Dv."""
    return -(-max(q.shape[-1], v.shape[-1]) // _ALIGNMENT) * _ALIGNMENT


def pad_heads(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def aligned_heads(x: Tensor, width: int) -> Tensor:
    """Return x with zeros up to a head dim, and a copy if a head begins at an unaligned address."""
    if x.shape[-1] < width:
        return pad_heads(x, width)
    *steps, last = x.stride()
    # A number's last bits are 0 if it is a multiple of the alignment.
    bits = reduce(or_, steps, x.storage_offset())
    is_aligned = last == 1 and not bits % _ALIGNMENT
    # `contiguous` would return a contiguous x as it is.
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def lse_columns(dtype: torch.dtype) -> tuple[float, ...]:
    """Return what fills each of the columns that v gets if lse has a gradient.

    Some fused kernels take no gradient of lse, dlse. It is therefore added to dout·v: v gets
    columns of these numbers, dout gets columns whose product with the numbers is dlse, and out gets
    columns of zeros. dlse is fp32, and in half precision one column would round it, and be infinite
    above 65,504 in fp16. Two columns hold 16 bits of it in bf16. In fp16 they hold 22 bits, and
    numbers up to 1.3e8, with a remainder of at most 32,768.
    """
    return (2.0**11, 1.0) if dtype.itemsize == 2 else (1.0,)


def with_lse_columns(v: Tensor) -> Tensor:
    """Return v (…, Dv) with columns for the gradient of lse."""
    columns = [v.new_full((*v.shape[:-1], 1), x) for x in lse_columns(v.dtype)]
    return torch.cat([v, *columns], -1)


def with_dlse(dout: Tensor, dlse: Tensor) -> Tensor:
    """Return dout (…, Dv) with the gradient of lse (…) in columns; see `lse_columns`."""
    columns, remainder = [dout], dlse[..., None]
    for factor in lse_columns(dout.dtype):
        columns.append((remainder / factor).to(dout.dtype))
        remainder = remainder - columns[-1].to(dlse.dtype) * factor
    return torch.cat(columns, -1)
