"""What gives an element the same bits wherever in a tensor it is, and whatever else is in that.

On CPUs torch computes the last elements of a range by other code than the rest, with other
roundings for sigmoid and logaddexp. Not so for exp and log1p, nor for single additions and
multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_anywhere(x: Tensor) -> Tensor:
    """Return the sigmoid of x."""
    return 1 / (1 + torch.exp(-x))


def logaddexp_anywhere(x: Tensor, y: Tensor) -> Tensor:
    """Return log(exp(x) + exp(y)), also where both are infinite."""
    larger, distance = torch.maximum(x, y), (x - y).abs()
    return torch.where(larger.isinf(), larger, larger + torch.log1p(torch.exp(-distance)))
