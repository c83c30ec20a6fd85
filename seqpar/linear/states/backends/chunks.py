"""Cut spans into chunks of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.ranges import count_up
from seqpar.linear.routes import SpanStates


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


def chunks_of(spans: SpanStates, size: int) -> list[Chunk]:
    """Return the spans' chunks of `size` rows; they are kept with the spans."""
    return spans.derived(("aten chunks", size), lambda: _chunks(spans, size))


def rows_of_chunks(spans: SpanStates, size: int, device: torch.device) -> Tensor:
    """Return (3, chunks) on the device: each chunk's length, `since` and `until`."""

    def build() -> Tensor:
        rows = [(x.length, x.since, x.until) for x in chunks_of(spans, size)]
        return torch.tensor(rows, device=device).view(-1, 3).T

    return spans.derived(("rows of aten chunks", size, device), build)


def _chunks(spans: SpanStates, size: int) -> list[Chunk]:
    count = -(-np.diff(spans.edges) // size)
    span = np.repeat(np.arange(count.size), count)
    first, last = spans.edges[span], spans.edges[span + 1]
    start = first + size * count_up(count)
    stop = np.minimum(start + size, last)
    columns = [span, start == first, stop == last, start - first, last - stop]
    rows = map(slice, start.tolist(), stop.tolist())
    return list(map(Chunk, rows, *(x.tolist() for x in columns)))
