"""Indices of tensors on a device: slices where they can be, which copy nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints

Index = slice | Tensor


def index_of(numbers: Ints, device: torch.device) -> Index:
    """Return the numbers as a slice, where they are one, else on the device."""
    if (np.diff(numbers) == 1).all():
        first = int(numbers[0]) if numbers.size else 0
        return slice(first, first + numbers.size)
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
