"""Rows in 8 bits, for messages: integers, and a scale for each row and head.

An element x becomes round(x / s), with s a 127th of the row's largest absolute value in that head,
in fp32. So it errs by at most s / 2 and the rounding of the dtype that it is decoded to. A row that
has an infinite value or a NaN is NaN when it is decoded.

Legend: D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.arguments import shown

_LARGEST = 127
_SCALE = 4  # bytes


def check_message_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ValueError unless keys can travel in it: None, their own dtype, or int8."""
    if dtype is not None and dtype is not torch.int8:
        raise ValueError(f"message_dtype must be None or torch.int8, got {shown(dtype)}")


def check_digits(message_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raise a ValueError if a call's dtype has more digits than messages may lose."""
    if message_dtype is not None and dtype == torch.float64:
        raise ValueError("message_dtype must be None with fp64, whose digits 8 bits would lose")


def encode(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return (…, ΣD + 4·parts) int8 of x (…, ΣD), whose parts of D columns have a scale each."""
    parts = x.split_with_sizes(list(dims), -1)
    largest = torch.stack([part.abs().amax(-1) for part in parts], -1)
    scales = largest.float() / _LARGEST
    divisors = torch.where(scales == 0, 1, scales)[..., None]
    codes = [
        (part / divisors[..., i, :]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        for i, part in enumerate(parts)
    ]
    return torch.cat([*codes, scales.view(torch.int8)], -1)


def decode(message: Tensor, dims: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the parts (…, D) of what `encode` returned, in a dtype."""
    *codes, scales = message.split_with_sizes([*dims, _SCALE * len(dims)], -1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return [(x * scales[..., i : i + 1]).to(dtype) for i, x in enumerate(codes)]


def encoded_width(dims: Sequence[int]) -> int:
    """Return how many bytes `encode` makes of a row and head with parts of these dims."""
    return sum(dims) + _SCALE * len(dims)
