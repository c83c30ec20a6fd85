"""The rows of a rank's tensors that hold the tokens of growing sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.layout.layout import Layout


class CacheRows:
    """The tokens of each sequence on each rank, and the rows that hold them.

    A rank's tensors have some rows for sequence 0, then for sequence 1, and so on. The first rows
    of each sequence hold its tokens and the others are free, so a sequence can grow without moving
    the rows of others.

    Attributes:
        lengths: (N,) the lengths of the sequences.
        held: (P, N) how many tokens of each sequence each rank has.
        capacities: (P, N) how many rows each rank has for each sequence.
    """

    def __init__(self, layout: Layout, free_rows: int) -> None:
        """Begin with the documents of a layout, and with free rows for each of them."""
        self.lengths = np.diff(layout.cu_seqlens)
        self._spans: list[list[list[tuple[int, int]]]] = []
        for rank in range(layout.ranks):
            rank_spans: list[list[tuple[int, int]]] = [[] for _ in range(self.lengths.size)]
            for document, start, stop in layout.spans(rank):
                rank_spans[document].append((start, stop))
            self._spans.append(rank_spans)
        self.held = self._count_tokens()
        self.capacities = self.held + free_rows

    def extend(self, owner: int, tokens: int, min_growth: int) -> None:
        """Give a rank this many more tokens of each sequence.

        If its rows do not suffice, it gets an eighth more for each sequence, and at least
        `min_growth` more.
        """
        for spans, length in zip(self._spans[owner], self.lengths.tolist(), strict=True):
            start = spans.pop()[0] if spans and spans[-1][1] == length else length
            spans.append((start, length + tokens))
        self.lengths = self.lengths + tokens
        self.held[owner] += tokens
        held = self.held[owner]
        if (held > self.capacities[owner]).any():
            grown = held + np.maximum(held // 8, min_growth)
            self.capacities[owner] = np.maximum(self.capacities[owner], grown)

    def drop_last(self, tokens: int) -> None:
        """Drop this many tokens at the end of each sequence."""
        self.lengths = self.lengths - tokens
        for rank_spans in self._spans:
            for i, length in enumerate(self.lengths.tolist()):
                rank_spans[i] = [(a, min(b, length)) for a, b in rank_spans[i] if a < length]
        self.held = self._count_tokens()

    def drop_first(self, kept: int, free_rows: int) -> Ints:
        """Shorten each sequence to its last `kept` tokens, and set the number of free rows.

        Return (P, N): how many tokens of each sequence each rank dropped.
        """
        dropped, before = np.maximum(self.lengths - kept, 0), self.held
        for rank_spans in self._spans:
            for i, first in enumerate(dropped.tolist()):
                spans = [(max(a - first, 0), b - first) for a, b in rank_spans[i] if b > first]
                rank_spans[i] = spans
        self.lengths, self.held = self.lengths - dropped, self._count_tokens()
        self.capacities = self.held + free_rows
        return before - self.held

    def select(self, sequences: list[int]) -> None:
        """Keep these sequences, in this order; one may occur several times."""
        self.lengths = self.lengths[sequences]
        self._spans = [[list(rank_spans[i]) for i in sequences] for rank_spans in self._spans]
        self.held, self.capacities = self.held[:, sequences], self.capacities[:, sequences]

    def layout(self) -> Layout:
        """Return the layout of the sequences' tokens."""
        spans = [
            [(i, start, stop) for i, spans in enumerate(rank_spans) for start, stop in spans]
            for rank_spans in self._spans
        ]
        return Layout.from_spans(spans, np.r_[0, self.lengths.cumsum()])

    def decode_layout(self, tokens: int, chunk: int | None = None) -> tuple[Layout, Ints]:
        """Return a layout of all rows, and cu_seqlens of the last tokens in its documents.

        With `chunk`, its documents are chunks of that many tokens.
        """
        layout = self._layout_of_rows()
        ends = layout.cu_seqlens[1::2]
        if chunk is not None:
            layout = layout.chunked(chunk)
        queries = (ends[:, None] + np.arange(-tokens, 0)).ravel()
        edges = layout.cu_seqlens
        documents = np.searchsorted(edges, queries, "right") - 1
        counts = np.bincount(documents, minlength=edges.size - 1)
        return layout, np.r_[0, counts.cumsum()]

    def _layout_of_rows(self) -> Layout:
        """Return a layout of the rows up to the last token of each rank.

        Sequence i is document 2i. Document 2i + 1 has the free rows after it.
        """
        empty = (self.capacities - self.held)[:, :-1]  # the last sequence's free rows are left out
        starts = np.cumsum(empty, 0) - empty
        lengths = np.zeros(2 * self.lengths.size - 1, np.int64)
        lengths[::2], lengths[1::2] = self.lengths, empty.sum(0)
        spans = []
        stops = starts + empty
        for rank, rank_spans in enumerate(self._spans):
            tokens = [(2 * i, *span) for i, parts in enumerate(rank_spans) for span in parts]
            gaps = zip(starts[rank].tolist(), stops[rank].tolist(), strict=True)
            spans.append(tokens + [(2 * i + 1, *gap) for i, gap in enumerate(gaps)])
        return Layout.from_spans(spans, np.r_[0, lengths.cumsum()])

    def rows_in_use(self, rank: int) -> int:
        """Return how many rows there are up to a rank's last token."""
        return int(self.capacities[rank, :-1].sum() + self.held[rank, -1])

    def last_rows(self, rank: int, tokens: int) -> Tensor:
        """Return (N·tokens,): the rows of the last tokens that a rank has of each sequence."""
        ends = np.cumsum(self.capacities[rank]) - self.capacities[rank] + self.held[rank]
        return torch.from_numpy((ends[:, None] - np.arange(tokens, 0, -1)).ravel())

    def _count_tokens(self) -> Ints:
        counts = [
            [sum(stop - start for start, stop in spans) for spans in rank_spans]
            for rank_spans in self._spans
        ]
        return np.array(counts, np.int64).reshape(len(self._spans), -1)


@dataclass
class CacheLayer:
    """A layer's keys and values on this rank, (…, rows, Hkv, D)."""

    k: Tensor
    v: Tensor
    capacities: Ints  # (N,) rows for each sequence
    length: int  # of the longest sequence, as of the last step in which the layer attended
    owns_memory: bool  # False while k and v are the tensors that `put` got: these are not written

    def rearrange(
        self, held: Ints, capacities: Ints, sequences: Sequence[int] | None, dropped: Ints | None
    ) -> None:
        """Copy the rows of some sequences (default: all) to new memory with these capacities.

        `held` and `capacities` are for the sequences in their new order. The first `held` rows of
        each are copied, after the first `dropped` rows, which are for the sequences in their old
        order.
        """
        kept = range(held.size) if sequences is None else sequences
        starts, ends = np.cumsum(self.capacities) - self.capacities, np.cumsum(capacities)
        if dropped is not None:
            starts = starts + dropped

        def rearranged(x: Tensor) -> Tensor:
            # A tensor made in inference mode could only be written to in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                copy = x.new_empty((*x.shape[:-3], int(ends[-1]), *x.shape[-2:]))
                for i, end, capacity, rows in zip(kept, ends, capacities, held, strict=True):
                    source = x.narrow(-3, int(starts[i]), int(rows))
                    copy.narrow(-3, int(end - capacity), int(rows)).copy_(source)
            return copy

        self.k, self.v = rearranged(self.k), rearranged(self.v)
        self.capacities, self.owns_memory = capacities, True
