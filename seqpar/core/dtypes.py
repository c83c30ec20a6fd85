"""The dtypes of operands of attention, and the dtypes in which attention accumulates."""

from __future__ import annotations

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partials, states and gradient sums: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulator_itemsize(itemsize: int) -> int:
    """Return the bytes of an element of `accumulator_dtype`, for a dtype of `itemsize` bytes."""
    return max(4, itemsize)
