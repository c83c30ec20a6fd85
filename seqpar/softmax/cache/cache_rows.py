"""Which tokens of growing sequences each rank has, and in which rows of its tensors they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.layout.layout import Layout


class CacheRows:
    """Which tokens of each sequence each rank has, and the rows of its tensors that have them.

    The rows of a rank are those of sequence 0, then of sequence 1, and so on: for each there is
    some room, whose first rows have tokens. So a sequence grows without moving the others.

    Attributes:
        lengths: (N,), of the sequences.
        held: (P, N), how many tokens of each sequence each rank has.
        rooms: (P, N), how many rows there are for them.
    """

    def __init__(self, layout: Layout, room: int) -> None:
        """Begin with the documents of a layout, and with so many more rows for each."""
        self.lengths = np.diff(layout.cu_seqlens)
        self._spans: list[list[list[tuple[int, int]]]] = []
        for rank in range(layout.ranks):
            of_rank: list[list[tuple[int, int]]] = [[] for _ in range(self.lengths.size)]
            for document, start, stop in layout.spans(rank):
                of_rank[document].append((start, stop))
            self._spans.append(of_rank)
        self.held = self._counted()
        self.rooms = self.held + room

    @property
    def ranks(self) -> int:
        """P: how many ranks there are."""
        return len(self._spans)

    def extend(self, owner: int, tokens: int, least: int) -> None:
        """Give so many more tokens of each sequence to a rank.

        If there is no room for them, its sequences get an eighth more, and `least` at least.
        """
        for spans, length in zip(self._spans[owner], self.lengths.tolist(), strict=True):
            start = spans.pop()[0] if spans and spans[-1][1] == length else length
            spans.append((start, length + tokens))
        self.lengths = self.lengths + tokens
        self.held[owner] += tokens
        held = self.held[owner]
        if (held > self.rooms[owner]).any():
            self.rooms[owner] = np.maximum(self.rooms[owner], held + np.maximum(held // 8, least))

    def truncate(self, dropped: int) -> None:
        """Drop so many tokens at the end of each sequence."""
        self.lengths = self.lengths - dropped
        for of_rank in self._spans:
            for i, length in enumerate(self.lengths.tolist()):
                of_rank[i] = [(a, min(b, length)) for a, b in of_rank[i] if a < length]
        self.held = self._counted()

    def forget(self, kept: int, room: int) -> Ints:
        """Drop the first tokens of longer sequences, so that each has `kept`, with so much room.

        Return (P, N): how many rows of each sequence each rank had for them, its first ones.
        """
        dropped, before = np.maximum(self.lengths - kept, 0), self.held
        for of_rank in self._spans:
            for i, first in enumerate(dropped.tolist()):
                of_rank[i] = [(max(a - first, 0), b - first) for a, b in of_rank[i] if b > first]
        self.lengths, self.held = self.lengths - dropped, self._counted()
        self.rooms = self.held + room
        return before - self.held

    def select(self, sequences: list[int]) -> None:
        """Keep these sequences, in this order; one may be there several times."""
        self.lengths = self.lengths[sequences]
        self._spans = [[list(of_rank[i]) for i in sequences] for of_rank in self._spans]
        self.held, self.rooms = self.held[:, sequences], self.rooms[:, sequences]

    def layout(self) -> Layout:
        """Return which tokens each rank has."""
        spans = [
            [(i, start, stop) for i, of_one in enumerate(of_rank) for start, stop in of_one]
            for of_rank in self._spans
        ]
        return Layout.from_spans(spans, np.r_[0, self.lengths.cumsum()])

    def of_call(self, tokens: int, chunk: int | None = None) -> tuple[Layout, Ints]:
        """Return the layout of the rows, and cu_seqlens of the last tokens in its documents.

        With `chunk` its documents are chunks of the sequences, of so many tokens.
        """
        layout = self._of_rows()
        ends = layout.cu_seqlens[1::2]
        if chunk is not None:
            layout = layout.chunked(chunk)
        queries = (ends[:, None] + np.arange(-tokens, 0)).ravel()
        edges = layout.cu_seqlens
        documents = np.searchsorted(edges, queries, "right") - 1
        counts = np.bincount(documents, minlength=edges.size - 1)
        return layout, np.r_[0, counts.cumsum()]

    def _of_rows(self) -> Layout:
        """Return the layout of the rows up to the last token of each rank.

        Sequence i is document 2i in it. The document behind it is of rows that have no token.
        """
        empty = (self.rooms - self.held)[:, :-1]  # behind the last sequence none are needed
        starts = np.cumsum(empty, 0) - empty
        lengths = np.zeros(2 * self.lengths.size - 1, np.int64)
        lengths[::2], lengths[1::2] = self.lengths, empty.sum(0)
        spans = []
        stops = starts + empty
        for rank, of_rank in enumerate(self._spans):
            of_rows = [(2 * i, *span) for i, of_one in enumerate(of_rank) for span in of_one]
            gaps = zip(starts[rank].tolist(), stops[rank].tolist(), strict=True)
            spans.append(of_rows + [(2 * i + 1, *gap) for i, gap in enumerate(gaps)])
        return Layout.from_spans(spans, np.r_[0, lengths.cumsum()])

    def used(self, rank: int) -> int:
        """Return how many rows there are up to a rank's last token."""
        return int(self.rooms[rank, :-1].sum() + self.held[rank, -1])

    def last(self, rank: int, tokens: int) -> Tensor:
        """Return (N·tokens,): the rows of the last tokens that a rank has of each sequence."""
        ends = np.cumsum(self.rooms[rank]) - self.rooms[rank] + self.held[rank]
        return torch.from_numpy((ends[:, None] - np.arange(tokens, 0, -1)).ravel())

    def _counted(self) -> Ints:
        return np.array(
            [[sum(b - a for a, b in of_one) for of_one in of_rank] for of_rank in self._spans],
            np.int64,
        ).reshape(len(self._spans), -1)


@dataclass
class CacheLayer:
    """A layer's keys and values on this rank, (…, rows, Hkv, D), with so many rows a sequence."""

    k: Tensor
    v: Tensor
    rooms: Ints
    length: int  # of the longest sequence, as far as the layer has come
    ours: bool  # whether k and v may be written to: those that were put are the model's

    def rearrange(
        self, held: Ints, rooms: Ints, sequences: Sequence[int] | None, dropped: Ints | None
    ) -> None:
        """Take memory of its own with this room for its sequences; see `rearranged`."""
        kept = range(held.size) if sequences is None else sequences
        self.k, self.v = (
            rearranged(x, self.rooms, kept, held, rooms, dropped) for x in (self.k, self.v)
        )
        self.rooms, self.ours = rooms, True


def rearranged(
    x: Tensor,
    rooms: Ints,
    sequences: Sequence[int],
    held: Ints,
    new_rooms: Ints,
    dropped: Ints | None = None,
) -> Tensor:
    """Return the rows of some sequences with other rooms, (…, rows, H, D) -> (…, new rows, H, D).

    `rooms` are those in x; `held` (the first rows, which are copied) and `new_rooms` are of the
    sequences in their new order. Before those are the first rows that are `dropped`, by sequence.
    """
    starts, ends = np.cumsum(rooms) - rooms, np.cumsum(new_rooms)
    if dropped is not None:
        starts = starts + dropped
    with torch.inference_mode(False), torch.no_grad():  # else only inference mode may write to it
        made = x.new_empty((*x.shape[:-3], int(ends[-1]), *x.shape[-2:]))
        for i, end, room, rows in zip(sequences, ends, new_rooms, held, strict=True):
            source = x.narrow(-3, int(starts[i]), int(rows))
            made.narrow(-3, int(end - room), int(rows)).copy_(source)
    return made
