"""Exponentials of sums of log decays, and the sums of gradients that go back to them."""

from __future__ import annotations

import torch
from torch import Tensor


def exp(x: Tensor) -> Tensor:
    """Return exp x for x ≤ 0, flushed."""
    return flush_(torch.exp(x))


def flush_(powers: Tensor) -> Tensor:
    """Set powers to 0 where products with them might be subnormal, which is slow."""
    limits = torch.finfo(powers.dtype)
    return torch.threshold_(powers, limits.tiny / limits.eps, 0.0)


def until(size: int, like: Tensor) -> Tensor:
    """Return (size, size): whether row i has the power of row j in its sum, which is so for j ≤ i.

    Multiplied from the left, it sums the rows until each.
    """
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_()
