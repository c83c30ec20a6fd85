"""Cut spans into chunks of C rows, so that the chunks of all spans are computed together.

A *span* is a range of consecutive tokens of a document on one rank. A state passes through the
chunks of a span one after another. Step i computes chunk i of all spans at once. Chunks are
therefore ordered by step: the first chunk of each span comes first, the second chunk of each span
with at least two chunks follows, and so on. In each step, spans with the most chunks come first.

A tensor of chunks is (M, N, G, C, D): there are M chunks, N = B · H, and G heads share a state.
Some tensors have no dimension G. The last chunk of a span is padded with rows of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import TableHolder, kept_on
from seqpar.core.ranges import count_up
from seqpar.linear.routes import SpanStates


class Places(NamedTuple):
    """Which spans of a grid have a state, and where these states are in a tensor of states.

    The state of the span spans[i] has the index states[i] in the tensor of states.
    """

    spans: Tensor
    states: Tensor

    @classmethod
    def of(cls, states: Ints) -> Places:
        spans = np.flatnonzero(states >= 0)
        return cls(*map(torch.from_numpy, (spans, states[spans])))

    def __bool__(self) -> bool:
        return self.spans.numel() > 0

    def fill(self, spans: Tensor, states: Tensor | None) -> Tensor:
        """Copy states to the tensor `spans`, which has an entry for each span, and return `spans`.

        A *span* is a range of consecutive tokens of a document on one rank. Entries of spans
        without a state are not changed.
        """
        if states is not None:
            found = states.index_select(0, self.states)
            spans.index_copy_(0, self.spans, found.view(len(found), *spans.shape[1:]))
        return spans

    def put(self, states: Tensor, spans: Tensor) -> None:
        """Copy the entries of `spans` to the states of the same spans in `states`.

        Entries of spans without a state are not copied.
        """
        found = spans.index_select(0, self.spans)
        states.index_copy_(0, self.states, found.view(len(found), *states.shape[1:]))


@dataclass(frozen=True, eq=False)
class Grid(TableHolder):
    size: int  # C, a power of two
    # the number of spans, which are sorted by their number of chunks, in descending order
    spans: int
    # The chunks of each step. Step n has a chunk of each span with more than n chunks.
    steps: list[slice]
    rows: Tensor  # (rows,): the rows of the spans, as indices into the operands
    slots: Tensor  # (rows,): the index of each row among the rows of all chunks
    plain: slice | None  # the rows as a slice, if they are consecutive and fill all chunks
    entering: Places  # the states that enter the grid's spans
    leaving: Places  # the states that leave the grid's spans

    @property
    def chunks(self) -> int:
        """M, the number of chunks."""
        return self.steps[-1].stop if self.steps else 0

    def cut(self, x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Return a copy of x (B, T, h, D) that is cut into M chunks of C rows, (M, B·H, G, C, D).

        H is the number of states. If h < H, the heads of x are repeated, and G is 1. If h ≥ H, G =
        h / H heads share a state.
        """
        if self.plain is not None:
            x = x[:, self.plain]
        else:
            filled = x.new_zeros((x.shape[0], self.chunks * self.size, *x.shape[2:]))
            x = filled.index_copy_(1, self.slots, x.index_select(1, self.rows))
        batch, _, found, dim = x.shape
        x = x.unflatten(1, (self.chunks, self.size))  # (B, M, C, h, D)
        states, group = min(found, heads), max(1, found // heads)
        shape = batch, self.chunks, self.size, states, heads // states, group, dim
        x = x.view(*shape[:4], 1, group, dim).expand(shape)
        x = x.permute(1, 0, 3, 4, 5, 2, 6)  # (M, B, h, H / h, G, C, D)
        chunks = x.new_empty(x.shape, dtype=dtype).copy_(x)
        return chunks.view(self.chunks, batch * heads, group, self.size, dim)

    def join(self, chunks: Tensor, target: Tensor, heads: int) -> None:
        """Write the chunks (M, B·H, G, C, D) to their rows of `target` (B, T, h, D).

        If h < H, heads were repeated when x was cut. The repeated heads are added up.
        """
        batch, _, found, dim = target.shape
        group, states = chunks.shape[2], found // chunks.shape[2]
        x = chunks.reshape(self.chunks, batch, states, heads // states, group, self.size, dim)
        x = x.sum(3) if heads != states else x[:, :, :, 0]
        x = x.permute(1, 0, 4, 2, 3, 5)  # (B, M, C, h / G, G, D)
        if self.plain is not None:
            rows = target[:, self.plain]
            rows.copy_(x.reshape(rows.shape))
        else:
            x = x.reshape(batch, self.chunks * self.size, found, dim)
            rows = x.index_select(1, self.slots).to(target.dtype)
            target.index_copy_(1, self.rows, rows)


def grids(spans: SpanStates, states: str, most: int, device: torch.device) -> list[Grid]:
    """Return a grid of the spans without a state, and a grid of the spans with a state.

    A *span* is a range of consecutive tokens of a document on one rank. A *grid* cuts spans into
    chunks of rows. If no span has a state, or if all spans have a state, there is only one grid.

    Args:
        spans: the spans of the rank.
        states: the name of the state, "state_in" or "state_out".
        most: the largest number of rows of a chunk.
        device: the device of the tables.
    """

    def build() -> list[Grid]:
        none = getattr(spans, states) < 0
        chosen = [np.flatnonzero(x) for x in (none, ~none) if x.any()]
        return [_grid(spans, x, most) for x in chosen]

    return kept_on(device, spans.derived, ("recurrent grids", states, most), build)


def _grid(spans: SpanStates, chosen: Ints, most: int) -> Grid:
    lengths = np.diff(spans.edges)[chosen]
    size = min(most, 1 << int(max(1, lengths.max()) - 1).bit_length())
    chunks = -(-lengths // size)
    order = np.argsort(-chunks, kind="stable")
    chosen, lengths, chunks = chosen[order], lengths[order], chunks[order]
    # For each step, the number of spans that have a chunk in the step.
    counts = np.searchsorted(-chunks, -np.arange(chunks.max()), side="left")
    ends = np.cumsum(counts)
    steps = [slice(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]
    position, number = count_up(lengths), np.repeat(np.arange(chosen.size), lengths)
    slots = ((ends - counts)[position // size] + number) * size + position % size
    rows = np.repeat(spans.edges[:-1][chosen], lengths) + position
    plain = None
    if chosen.size == 1 and lengths[0] == chunks[0] * size > 0:
        plain = slice(int(rows[0]), int(rows[-1]) + 1)
    return Grid(
        size,
        chosen.size,
        steps,
        torch.from_numpy(rows),
        torch.from_numpy(slots),
        plain,
        Places.of(spans.state_in[chosen]),
        Places.of(spans.state_out[chosen]),
    )
