"""Encode rows in 8 bits for messages, with an fp32 scale for each row and head.

An element x becomes round(x / s), where s is 1/127 of the row's largest absolute value in that
head. The error is at most s / 2, plus rounding to the dtype that it is decoded to. A row with an
infinite value or a NaN decodes to NaN.

Legend: D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.arguments import shown

_LARGEST = 127
_SCALE_BYTES = 4


def check_message_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ValueError unless it is int8 or None, which means the keys' own dtype."""
    if dtype is not None and dtype is not torch.int8:
        raise ValueError(f"message_dtype must be None or torch.int8, got {shown(dtype)}")


def check_digits(message_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raise a ValueError for 8-bit messages of fp64 tensors."""
    if message_dtype is not None and dtype == torch.float64:
        raise ValueError("message_dtype must be None with fp64, whose digits 8 bits would lose")


def encode(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return int8 (…, ΣD + 4·parts) for x (…, ΣD); each part of D columns has its own scale."""
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
    """Undo `encode`, and return the parts (…, D) in a dtype."""
    *codes, scales = message.split_with_sizes([*dims, _SCALE_BYTES * len(dims)], -1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return [(x * scales[..., i : i + 1]).to(dtype) for i, x in enumerate(codes)]


def encoded_width(dims: Sequence[int]) -> int:
    """Return the number of bytes that `encode` returns for a row and head with these dims."""
    return sum(dims) + _SCALE_BYTES * len(dims)
