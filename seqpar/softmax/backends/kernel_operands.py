"""Change operands so that fused kernels accept them.

Negative scales and scales of 0 are replaced by positive scales. Head dims are padded to a multiple
of 8. The gradient of lse is moved into additional columns of v and dout. D is the head dim of q and
k, and Dv is the head dim of v. The head dim is the last dimension of each tensor.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.softmax.compute.call_options import CallOptions

_ALIGNMENT = 8  # elements of 2 bytes; kernels load 16 bytes at a time


def positive_scale(q: Tensor, options: CallOptions) -> tuple[Tensor, CallOptions, int]:
    """Change q and options so that the scale is positive and the scores stay the same.

    Returns q, the options, and the sign of the original scale. To get dq of the original q,
    multiply dq of the returned q by the sign.
    """
    options, sign = positive_options(options)
    return q if sign == 1 else q * sign, options, sign


def positive_options(options: CallOptions) -> tuple[CallOptions, int]:
    if options.scale > 0:
        return options, 1
    # Kernels scale scores after masking. A scale of 0 would turn the −∞ of a masked score into NaN,
    # and a negative scale would turn it into +∞.
    return options._replace(scale=-options.scale or 1.0), -1 if options.scale else 0


def joint_head_dim(q: Tensor, v: Tensor) -> int:
    """Return the smallest multiple of 8 that is at least D and Dv."""
    return -(-max(q.shape[-1], v.shape[-1]) // _ALIGNMENT) * _ALIGNMENT


def pad_heads(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def aligned_heads(x: Tensor, width: int) -> Tensor:
    """Pad the head dim of x with zeros to `width`.

    If no padding is needed, x is returned. In this case, x is copied if any of its heads begins at
    an unaligned address.
    """
    if x.shape[-1] < width:
        return pad_heads(x, width)
    if _heads_are_aligned(x.stride(), x.storage_offset() % _ALIGNMENT):
        return x
    # If x is contiguous, `contiguous` would return x without a copy.
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(256)  # calls have few different strides
def _heads_are_aligned(strides: tuple[int, ...], offset: int) -> bool:
    *steps, last = strides
    return last == 1 and not any(x % _ALIGNMENT for x in (*steps, offset))


def lse_columns(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the numbers that fill the additional columns of v if lse has a gradient.

    Some fused kernels do not accept dlse, the gradient of lse. For these kernels, v and dout get
    additional columns, so that the product dout·v contains dlse. Each returned number fills one
    column of v.

    dlse is in fp32. In half precision, a single column would round dlse, and would be infinite
    above 65,504 in fp16. With two columns, dlse keeps 16 bits in bf16. In fp16, it keeps 22 bits,
    for numbers up to 1.3e8.
    """
    return (2.0**11, 1.0) if dtype.itemsize == 2 else (1.0,)


def with_lse_columns(v: Tensor) -> Tensor:
    columns = [v.new_full((*v.shape[:-1], 1), x) for x in lse_columns(v.dtype)]
    return torch.cat([v, *columns], -1)


def with_dlse(dout: Tensor, dlse: Tensor) -> Tensor:
    """Append columns that contain dlse (…), the gradient of lse, to dout (…, Dv); see
    `lse_columns`.
    """
    columns, remainder = [dout], dlse[..., None]
    for factor in lse_columns(dout.dtype):
        columns.append((remainder / factor).to(dout.dtype))
        remainder = remainder - columns[-1].to(dlse.dtype) * factor
    return torch.cat(columns, -1)
