"""Put several tensors of the same rows into one message.

Legend: B batch, n rows that travel, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """A tensor that travels, (B, n, H, *shape), of a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Packing:
    """A message with the tensors of some kinds, one after another, without gaps.

    Those of the largest elements come first, so that each begins at a multiple of its elements'
    size. The message is of the tensors' dtype, or of bytes if they have several.
    """

    def __init__(self, sizes: tuple[int, int, int], kinds: Sequence[Kind]) -> None:
        """Say where in the message each tensor lies; `sizes` are B, n and H."""
        dtypes = {kind.dtype for kind in kinds}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._order = sorted(range(len(kinds)), key=lambda i: -kinds[i].dtype.itemsize)
        self._views = [((*sizes, *kind.shape), kind.dtype) for kind in kinds]
        nbytes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._views]
        self._sizes = [nbytes[i] // self._dtype.itemsize for i in self._order]

    def empty(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return a new message, and its tensors (B, n, H, *shape), in the order of the kinds."""
        if len(self._views) == 1:
            ((shape, dtype),) = self._views
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return tensor, [tensor]
        message = torch.empty(sum(self._sizes), dtype=self._dtype, device=device)
        tensors = [message] * len(self._views)
        for i, part in zip(self._order, message.split_with_sizes(self._sizes), strict=True):
            shape, dtype = self._views[i]
            tensors[i] = part.view(dtype).view(shape)
        return message, tensors
