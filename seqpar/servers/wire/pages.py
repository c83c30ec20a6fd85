"""The pages that store the rows of a cache, on a server or in the trainer's process.

A *row* is the key and the value of a token. A *page* is a block of memory for consecutive rows. The
division of rows into pages depends only on the number of rows. The bits of attention therefore do
not depend on the number of steps in which the rows arrived.

Legend: B batch, T query tokens, Hq query heads, Hkv KV heads, D head dim (Dv of values).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Blocks, Positions, Slices
from seqpar.softmax.attend import attend_blocks
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.decode import by_kv_head, by_query_head

# A new page has as many rows as all pages before it together, within these limits. 64K tokens
# therefore need 10 pages, and a short cache uses at least half of its memory.
_MIN_PAGE_ROWS, _MAX_PAGE_ROWS = 2**8, 2**14
# Slices without a mask are kept if they have few query rows. Together they take at most 8 MiB.
_MAX_KEPT_SLICES, _MAX_KEPT_QUERY_ROWS = 64, 64


class RowShape(NamedTuple):
    """The shape of a cache's rows: keys (B, rows, Hkv, D) and values (B, rows, Hkv, Dv)."""

    dtype: torch.dtype
    batch: int
    kv_heads: int
    dim: int
    value_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> RowShape:
        return cls(k.dtype, k.shape[0], k.shape[2], k.shape[3], v.shape[3])

    @property
    def row_bytes(self) -> int:
        return self.batch * self.kv_heads * (self.dim + self.value_dim) * self.dtype.itemsize

    def nbytes(self, rows: int) -> int:
        """Return the bytes of the whole pages that hold this many rows."""
        if rows <= _MAX_PAGE_ROWS:  # each page after the first one doubles the number of rows
            return max(_MIN_PAGE_ROWS, 1 << (rows - 1).bit_length()) * self.row_bytes if rows else 0
        return -(-rows // _MAX_PAGE_ROWS) * _MAX_PAGE_ROWS * self.row_bytes


class Seen(NamedTuple):
    """The window of queries: a query at position i attends to rows i − left … i + right."""

    offset: int  # the position of the first query; the first row has position 0
    left: int
    right: int

    def rows(self, tokens: int, length: int) -> tuple[int, int]:
        """Return the range (start, stop) of rows to which at least one query attends.

        There are `tokens` queries, and `length` rows.
        """
        first, stop = self.offset - self.left, self.offset + tokens + self.right
        return (max(0, first), min(length, stop)) if tokens else (0, 0)


class Pages:
    """The keys and values of a sequence, or of a batch of sequences that are equally long."""

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        self.shape, self.device, self.nbytes = shape, device, 0
        self._pages: list[tuple[Tensor, Tensor]] = []

    def reserve(self, rows: int) -> None:
        """Allocate pages for the first `rows` rows."""
        if self.shape.nbytes(rows) <= self.nbytes:
            return
        dtype, batch, heads, *dims = self.shape
        # Tensors that are made in inference mode cannot be written to outside of inference mode.
        with torch.inference_mode(False):
            for start, stop in _pages(rows)[len(self._pages) :]:
                sizes = ((batch, stop - start, heads, dim) for dim in dims)
                k, v = (torch.empty(size, dtype=dtype, device=self.device) for size in sizes)
                self._pages.append((k, v))
        self.nbytes = max(self.nbytes, self.shape.nbytes(rows))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write the rows from `start` on, for which `reserve` must have allocated pages."""
        for page, rows, places in self._within(start, start + k.shape[1]):
            for kept, x in zip(page, (k, v), strict=True):
                kept[:, rows].copy_(x[:, places].detach())

    def settle(self) -> None:
        pass

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of rows start … stop − 1."""
        pieces = [[x[:, rows] for x in page] for page, rows, _ in self._within(start, stop)]
        if not pieces:
            dtype, batch, heads, *dims = self.shape
            sizes = ((batch, 0, heads, dim) for dim in dims)
            k, v = (torch.empty(size, dtype=dtype, device=self.device) for size in sizes)
            return k, v
        k, v = (torch.cat(pages, 1) for pages in zip(*pieces, strict=True))
        return k, v

    def attend(
        self, q: Tensor, length: int, seen: Seen, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of q (B, T, Hq, D) over the first `length` rows.

        Returns out (B, T, Hq, Dv) and lse (B, T, Hq), in fp32 (fp64 for fp64) and on q's device.
        """
        # The query heads that share a KV head become rows of one head, so that a kernel reads each
        # key only once.
        tokens, group = q.shape[1], q.shape[2] // self.shape.kv_heads
        exact = accumulator_dtype(q.dtype)
        rows = by_kv_head(q, self.shape.kv_heads).clone(memory_format=torch.contiguous_format)
        out = rows.new_zeros((*rows.shape[:3], self.shape.value_dim), dtype=exact)
        lse = rows.new_full(rows.shape[:3], -torch.inf, dtype=exact)
        blocks, slices = [], []
        first, last = seen.rows(tokens, length)
        for page, keys, places in self._within(first, last):
            blocks.append([x[:, keys].to(q.device) for x in page])
            start, stop = first + places.start, first + places.stop
            slices.append(_slices(tokens, group, start, stop, seen))
        if blocks:
            attend_blocks(rows, blocks, Blocks(tuple(slices)), options, None, (out, lse))
        return by_query_head(out, group), by_query_head(lse, group)

    def _within(
        self, start: int, stop: int
    ) -> Iterator[tuple[tuple[Tensor, Tensor], slice, slice]]:
        """Yield (page, rows of the page, rows of the range) for each page that has some of the rows
        start … stop − 1.

        The rows of the page and the rows of the range are Python slices. Both slices select the
        rows that are in the page and in the range. The first slice counts from the start of the
        page, and the second slice counts from the row `start`.
        """
        for page, (first, last) in zip(self._pages, _pages(stop), strict=False):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield page, slice(low - first, high - first), slice(low - start, high - start)


def _pages(rows: int) -> list[tuple[int, int]]:
    bounds, stop = [], 0
    while stop < rows:
        start, stop = stop, stop + min(_MAX_PAGE_ROWS, max(_MIN_PAGE_ROWS, stop))
        bounds.append((start, stop))
    return bounds


def _slices(tokens: int, group: int, start: int, stop: int, seen: Seen) -> Slices:
    """Return the mask of `tokens` queries, with `group` rows each, over the keys of rows start …
    stop − 1, as slices.
    """
    offset, left, right = seen
    if offset + tokens - 1 - left <= start and stop - 1 <= offset + right:
        rows = tokens * group
        return (_kept_unmasked if rows <= _MAX_KEPT_QUERY_ROWS else _unmasked)(rows, stop - start)
    shift = max(0, -offset)  # positions are not negative
    q_positions = np.arange(offset + shift, offset + shift + tokens, dtype=np.int32).repeat(group)
    k_positions = np.arange(start + shift, stop + shift, dtype=np.int32)
    return _one(q_positions, k_positions, (-left, right))


def _unmasked(rows: int, keys: int) -> Slices:
    q_positions, k_positions = (np.arange(n, dtype=np.int32) for n in (rows, keys))
    return _one(q_positions, k_positions, (-UNLIMITED, UNLIMITED))


_kept_unmasked = lru_cache(_MAX_KEPT_SLICES)(_unmasked)


def _one(q_positions: Positions, k_positions: Positions, band: tuple[int, int]) -> Slices:
    ranges = [[0, q_positions.size]], [[0, k_positions.size]], [band]
    q_rows, k_rows, bands = (np.array(x, dtype=np.int64) for x in ranges)
    none = np.empty((0, 2), np.int64)
    return Slices(q_rows, k_rows, bands, q_positions, k_positions, none)
