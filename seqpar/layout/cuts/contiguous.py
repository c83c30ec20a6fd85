"""The contiguous cut: each rank holds one range of the pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import enumerated
from seqpar.layout.cuts.cut import Columns, HeldSpans, HolderLookup, TableCut, nonempty


@dataclass(frozen=True)
class Contiguous(TableCut):
    """Rank c of P ranks holds the tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the pack."""

    ranks: int
    most_documents: int = 0  # see `Geometry.worst_case`
    # With `most_documents`, a random number. `load_tables` may replace the tables of such a layout,
    # so two equal layouts must not share tables.
    number: int = 0
    most_spans: ClassVar[int | None] = 1

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        first, behind = (int(cu_seqlens[-1]) * c // self.ranks for c in (rank, rank + 1))
        begin = np.searchsorted(cu_seqlens, first, side="right") - 1
        documents = np.arange(begin, np.searchsorted(cu_seqlens, behind))
        start, stop = cu_seqlens[documents], cu_seqlens[documents + 1]
        starts, stops = np.maximum(start, first) - start, np.minimum(stop, behind) - start
        return nonempty(documents, starts, stops)

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, self.ranks)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        cuts = self._cuts(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            begins = cu_seqlens[documents]
            edges = begins + starts, begins + stops - 1
            first, last = (np.searchsorted(cuts, x, side="right") - 1 for x in edges)
            index, owners = enumerated(first, last)
            start = np.maximum(cuts[owners] - begins[index], starts[index])
            stop = np.minimum(cuts[owners + 1] - begins[index], stops[index])
            return HeldSpans(index, owners, start, stop).nonempty()

        return lookup

    def _cuts(self, cu_seqlens: Ints) -> Ints:
        whole, rest = divmod(int(cu_seqlens[-1]), self.ranks)
        c = np.arange(self.ranks + 1)
        return whole * c + rest * c // self.ranks

    def table(self, cu_seqlens: Ints) -> tuple[Ints, Columns]:
        cuts = self._cuts(cu_seqlens)
        edges = np.unique(np.r_[cu_seqlens, cuts])
        documents = np.searchsorted(cu_seqlens, edges[:-1], side="right") - 1
        first = cu_seqlens[documents]
        return np.searchsorted(edges, cuts), (documents, edges[:-1] - first, edges[1:] - first)
