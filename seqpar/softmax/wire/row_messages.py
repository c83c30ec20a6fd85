"""Pack some rows of tensors into messages, and pack several tensors into one message.

A *block* is the rows of a tensor that a message contains, one row after another. Letters of shapes:
B is the batch, T the number of local rows, n the number of rows of a block, H the number of heads,
and D the head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import on_device
from seqpar.core.ranges import ranges

_MAX_CAST_ROWS = 1024  # the number of rows that are cast at a time, which limits memory


class Rows:
    """The local rows that one message contains, as ranges of row indices.

    The message contains the rows of the first range, followed by the rows of the next range, and so
    on. The indices of the rows are copied to a device only once.
    """

    def __init__(self, ranges: Ints) -> None:
        self._table = ranges
        self.count = int((ranges[:, 1] - ranges[:, 0]).sum())
        self.is_range = len(ranges) == 1  # then the rows of a contiguous tensor are a view
        # The first row, and the row after the last one; (0, 0) if there are no rows.
        self.reach = (int(ranges[:, 0].min()), int(ranges[:, 1].max())) if self.count else (0, 0)
        self._range = slice(*ranges[0].tolist()) if self.is_range else slice(0)
        self._places: dict[int, Tensor] = {}

    def are_all(self, rows: int) -> bool:
        """Return whether the block contains all rows of a tensor with `rows` rows, in order."""
        return self.is_range and self.reach == (0, rows)

    def pack(self, *parts: Tensor) -> Tensor:
        """Copy some rows of tensors (T, B, H, D) into one contiguous tensor (n, B, H, ΣD).

        The rows are the n rows of this object. If there is only one tensor, and the n rows are
        contiguous in this tensor, a view is returned and nothing is copied.
        """
        if self.is_range:
            views = [x[self._range] for x in parts]
            return torch.cat(views, -1) if len(views) > 1 else views[0].contiguous()
        dims = [x.shape[3] for x in parts]
        packed = parts[0].new_empty((self.count, *parts[0].shape[1:3], sum(dims)))
        indices = self._indices(packed.device)
        for x, part in zip(parts, packed.split_with_sizes(dims, -1), strict=True):
            torch.index_select(x, 0, indices, out=part)
        return packed

    def add(self, block: Tensor, total: Tensor) -> None:
        """Add a block (n, B, H, D), of any dtype, to the block's rows of `total` (T, B, H, D)."""
        if self.is_range:
            total[self._range].add_(block)
        else:
            add_rows(block.transpose(0, 1), total.transpose(0, 1), self._indices(total.device))

    def select(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return some rows of x (B, T, …) as one contiguous tensor (B, n, …).

        The rows are the n rows of this object. If `out` is given, the result is written to `out`.
        If `out` is None, and the rows are contiguous in x, the result is a view of x.
        """
        if not self.is_range:
            return torch.index_select(x, 1, self._indices(x.device), out=out)
        selected = x[:, self._range]
        return selected.contiguous() if out is None else out.copy_(selected)

    def local(self, device: torch.device) -> slice | Tensor:
        """Return the block's local rows: a slice for a single range, and indices for several
        ranges.

        The indices are a tensor on `device`.
        """
        return self._range if self.is_range else self._indices(device)

    def place(self, rows: int, device: torch.device) -> int | Tensor:
        """Return where local rows lie in the message, as an argument for Triton kernels.

        If the rows of the message are a single range, the result is the index of the first local
        row in the range. If there are several ranges, the result is an int32 tensor (rows,) on
        `device`: for each of the `rows` local rows, its index in the message, or −1 if the message
        does not contain the row.
        """
        if self.is_range:
            return self.reach[0]
        if rows not in self._places:
            places = torch.full((rows,), -1, dtype=torch.int32)
            places[self._on_host] = torch.arange(self.count, dtype=torch.int32)
            self._places.setdefault(rows, places)  # another thread may have made them
        return on_device(self._places[rows], device)

    def _indices(self, device: torch.device) -> Tensor:
        return on_device(self._on_host, device)

    @cached_property
    def _on_host(self) -> Tensor:
        return torch.from_numpy(ranges(*self._table.T))


def add_rows(part: Tensor, total: Tensor, rows: slice | Tensor, sign: int = 1) -> None:
    """Add sign · part to some rows of `total` (B, T, H, D).

    `part` is (B, n, H, D), of any dtype. `rows` is a slice of n rows, or n different indices.
    """
    if isinstance(rows, slice):
        total[:, rows].add_(part, alpha=sign)
    elif total.is_cuda and total.dtype == torch.float32:  # adds without a copy of the part in fp32
        from seqpar.kernels.flash_attention import add_to_rows  # imports Triton

        add_to_rows(part, total, rows, sign)
    elif part.dtype == total.dtype:
        total.index_add_(1, rows, part, alpha=sign)
    else:
        parts = zip(part.split(_MAX_CAST_ROWS, 1), rows.split(_MAX_CAST_ROWS), strict=True)
        for x, where in parts:
            total.index_add_(1, where, x.to(total.dtype), alpha=sign)


class RowFormat(NamedTuple):
    """The shape and dtype of a tensor (B, n, H, *shape) in a message.

    With `planes`, the dimensions `shape` are the outermost dimensions in memory, before B, n and H.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    planes: bool = False


class _View(NamedTuple):
    """The location of a tensor in a message. Strides and offset count elements of the tensor's
    dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Packing:
    """The arrangement of several tensors in one message, one tensor after another without gaps.

    Tensors are ordered by the size of their elements, largest first. Each tensor therefore begins
    at a multiple of its element size.

    Attributes:
        elements: the number of elements of the message.
        dtype: the dtype of the message, which is the smallest dtype of the tensors.
    """

    def __init__(self, sizes: tuple[int, int, int], formats: Sequence[RowFormat]) -> None:
        """Arrange tensors of these formats in a message. `sizes` are B, n and H of each tensor."""
        ordered = sorted(range(len(formats)), key=lambda i: -formats[i].dtype.itemsize)
        self.dtype = formats[ordered[-1]].dtype
        # For each larger dtype, the element of the message at which its tensors end.
        self._ends: dict[torch.dtype, int] = {}
        views, end = dict[int, _View](), 0  # `end` counts bytes
        for i in ordered:
            shape, dtype = (*sizes, *formats[i].shape), formats[i].dtype
            strides = _strides(shape)
            if formats[i].planes:
                plane_strides = _strides((*formats[i].shape, *sizes))
                strides = (*plane_strides[-len(sizes) :], *plane_strides[: -len(sizes)])
            views[i] = _View(dtype, shape, strides, end // dtype.itemsize)
            end += math.prod(shape) * dtype.itemsize
            self._ends[dtype] = end // self.dtype.itemsize
        self.elements = self._ends.pop(self.dtype)
        self._views = [views[i] for i in range(len(formats))]

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def empty(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Allocate a message. Return the message, and views of the tensors in the message."""
        message = torch.empty(self.elements, dtype=self.dtype, device=device)
        return message, self.tensors(message)

    def tensors(self, message: Tensor) -> list[Tensor]:
        """Return views (B, n, H, *shape) of the tensors in a message, in the order of the formats.

        The message must begin at the start of its storage.
        """
        by_dtype = self._by_dtype(message)
        return [
            by_dtype[dtype].as_strided(shape, strides, offset)
            for dtype, shape, strides, offset in self._views
        ]

    def apart(self, memory: Tensor) -> list[Tensor]:
        """Return contiguous views of the tensors in the memory of a message, to be sent one by one.

        The elements of a tensor without `planes` have the same order as in the message.
        """
        by_dtype = self._by_dtype(memory)
        return [
            by_dtype[dtype][offset : offset + math.prod(shape)].view(shape)
            for dtype, shape, _, offset in self._views
        ]

    def _by_dtype(self, message: Tensor) -> dict[torch.dtype, Tensor]:
        by_dtype = {self.dtype: message}
        for dtype, end in self._ends.items():
            by_dtype[dtype] = message.narrow(0, 0, end).view(dtype)
        return by_dtype


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
