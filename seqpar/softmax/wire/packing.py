"""Put several tensors of the same rows into one message.

Legend: B batch, n rows that travel, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowFormat(NamedTuple):
    """A tensor that travels, (B, n, H, *shape), of a dtype.

    If it lies in `planes`, those elements of a message that have one index of `shape` are together,
    so that the tensors (B, n, H) are contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    planes: bool = False


class _View(NamedTuple):
    """Where a tensor lies in a message, in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Packing:
    """A message with the tensors of some kinds, one after another, without gaps.

    Those of the largest elements come first, so that each begins at a multiple of its elements'
    size. The message is of the smallest dtype that they have.
    """

    def __init__(self, sizes: tuple[int, int, int], kinds: Sequence[RowFormat]) -> None:
        """Say where in the message each tensor lies; `sizes` are B, n and H."""
        ordered = sorted(range(len(kinds)), key=lambda i: -kinds[i].dtype.itemsize)
        self._dtype = kinds[ordered[-1]].dtype
        self._ends: dict[torch.dtype, int] = {}  # of each other dtype, in the message
        views, end = dict[int, _View](), 0  # in bytes
        for i in ordered:
            shape, dtype = (*sizes, *kinds[i].shape), kinds[i].dtype
            strides = _strides(shape)
            if kinds[i].planes:
                of_planes = _strides((*kinds[i].shape, *sizes))
                strides = (*of_planes[-len(sizes) :], *of_planes[: -len(sizes)])
            views[i] = _View(dtype, shape, strides, end // dtype.itemsize)
            end += math.prod(shape) * dtype.itemsize
            self._ends[dtype] = end // self._dtype.itemsize
        self._elements = self._ends.pop(self._dtype)
        self._views = [views[i] for i in range(len(kinds))]

    def apart(self, device: torch.device) -> list[Tensor]:
        """Return new tensors, as `empty` does, that are a message each."""
        return [torch.empty(x.shape, dtype=x.dtype, device=device) for x in self._views]

    def empty(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return a new message, and its tensors (B, n, H, *shape), in the order of the kinds."""
        if len(self._views) == 1:
            tensors = self.apart(device)
            return tensors[0], tensors
        message = torch.empty(self._elements, dtype=self._dtype, device=device)
        of_dtype = {self._dtype: message}
        for dtype, end in self._ends.items():
            of_dtype[dtype] = message.narrow(0, 0, end).view(dtype)
        return message, [
            of_dtype[dtype].as_strided(shape, strides, offset)
            for dtype, shape, strides, offset in self._views
        ]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
