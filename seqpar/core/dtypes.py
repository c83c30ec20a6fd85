"""Which dtypes attention takes, and which it accumulates in."""

from __future__ import annotations

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what partials, states and gradient sums are kept in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
