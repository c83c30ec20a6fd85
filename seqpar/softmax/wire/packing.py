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
    """The form of a tensor (B, n, H, *shape) that travels.

    With `planes`, the dimensions of `shape` come first in memory: each tensor (B, n, H) of one
    index of `shape` is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    planes: bool = False


class _View(NamedTuple):
    """The place of a tensor in a message, in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Packing:
    """A message with several tensors, one after another, without gaps.

    Tensors with the largest elements come first, so that each tensor begins at a multiple of its
    element size. The message has the smallest dtype of its tensors.
    """

    def __init__(self, sizes: tuple[int, int, int], formats: Sequence[RowFormat]) -> None:
        """Find the place of each tensor; `sizes` are B, n and H."""
        ordered = sorted(range(len(formats)), key=lambda i: -formats[i].dtype.itemsize)
        self._dtype = formats[ordered[-1]].dtype
        self._ends: dict[torch.dtype, int] = {}  # where each other dtype ends in the message
        views, end = dict[int, _View](), 0  # in bytes
        for i in ordered:
            shape, dtype = (*sizes, *formats[i].shape), formats[i].dtype
            strides = _strides(shape)
            if formats[i].planes:
                plane_strides = _strides((*formats[i].shape, *sizes))
                strides = (*plane_strides[-len(sizes) :], *plane_strides[: -len(sizes)])
            views[i] = _View(dtype, shape, strides, end // dtype.itemsize)
            end += math.prod(shape) * dtype.itemsize
            self._ends[dtype] = end // self._dtype.itemsize
        self._elements = self._ends.pop(self._dtype)
        self._views = [views[i] for i in range(len(formats))]

    def apart(self, device: torch.device) -> list[Tensor]:
        """Return new tensors, as `empty` does, but each as a separate message."""
        return [torch.empty(x.shape, dtype=x.dtype, device=device) for x in self._views]

    def empty(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return a new message and its tensors (B, n, H, *shape), in the order of the formats."""
        if len(self._views) == 1:
            tensors = self.apart(device)
            return tensors[0], tensors
        message = torch.empty(self._elements, dtype=self._dtype, device=device)
        by_dtype = {self._dtype: message}
        for dtype, end in self._ends.items():
            by_dtype[dtype] = message.narrow(0, 0, end).view(dtype)
        return message, [
            by_dtype[dtype].as_strided(shape, strides, offset)
            for dtype, shape, strides, offset in self._views
        ]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
