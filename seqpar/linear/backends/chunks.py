"""Cut spans into chunks of rows, and put consecutive chunks into blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import Ints
from seqpar.layout.ranges import count_up
from seqpar.linear.spans import SpanStates

_BLOCK = 16  # chunks of a block


class Chunk(NamedTuple):
    """Some consecutive rows of one span."""

    rows: slice
    span: int
    first: bool  # of its span
    last: bool
    since: int  # rows between the span's start and the chunk
    until: int  # rows between the chunk and the span's end

    @property
    def length(self) -> int:
        """C, how many rows it has."""
        return self.rows.stop - self.rows.start


class Block(NamedTuple):
    """m consecutive chunks, and how many rows are between each two of them.

    `before[i, j]` and `behind[i, j]`, (m, m + 1), are the rows between chunk i and chunk j if j < i
    or j > i; −1 otherwise, and for chunks of different spans. Their last columns have the rows
    between the block's start and chunk i, and between chunk i and the block's end.
    """

    chunks: list[Chunk]
    before: Tensor
    behind: Tensor


def blocks_of(spans: SpanStates, size: int, device: torch.device) -> list[Block]:
    """Return the spans' chunks of `size` rows, in blocks; they are kept with the spans."""
    return spans.derived(("aten blocks", size, device), lambda: _blocks(spans, size, device))


def _blocks(spans: SpanStates, size: int, device: torch.device) -> list[Block]:
    count = -(-np.diff(spans.edges) // size)
    span = np.repeat(np.arange(count.size), count)
    first, last = spans.edges[span], spans.edges[span + 1]
    start = first + size * count_up(count)
    stop = np.minimum(start + size, last)
    columns = [span, start == first, stop == last, start - first, last - stop]
    rows = map(slice, start.tolist(), stop.tolist())
    chunks = list(map(Chunk, rows, *(x.tolist() for x in columns)))
    parts = [slice(i, i + _BLOCK) for i in range(0, len(chunks), _BLOCK)]
    return [Block(chunks[x], *_rows_between(span[x], start[x], stop[x], device)) for x in parts]


def _rows_between(
    span: Ints, start: Ints, stop: Ints, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `before` and `behind` of a block whose chunks have these spans and rows."""
    order = np.arange(span.size)
    same, earlier = span[:, None] == span, order[:, None] > order
    before = np.where(same & earlier, start[:, None] - stop, -1)
    behind = np.where(same & earlier.T, start - stop[:, None], -1)
    entered = np.where(span == span[0], start - start[0], -1)
    left = np.where(span == span[-1], stop[-1] - stop, -1)
    before, behind = np.c_[before, entered], np.c_[behind, left]
    return torch.from_numpy(before).to(device), torch.from_numpy(behind).to(device)
