"""Striped cuts: stripe s is on rank s mod P. A *stripe* is a range of consecutive tokens.

`Striped` counts stripes from the start of each document. `EvenStripes` counts stripes from the
start of the packed batch, so that all ranks hold the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up, enumerated, split_at
from seqpar.layout.cuts.cut import Columns, CountedCut, Counts, HeldSpans, HolderLookup
from seqpar.layout.cuts.dealing import Deal


@dataclass(frozen=True)
class Striped(CountedCut):
    """A cut that divides each document into stripes of `stripe` tokens. Rank s mod P holds stripe
    s.
    """

    ranks: int
    stripe: int
    alike: ClassVar[bool] = True
    most_spans: ClassVar[int | None] = None

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        lengths = np.diff(cu_seqlens)
        stripes = -(-lengths // self.stripe)
        held = np.maximum(-(-(stripes - rank) // self.ranks), 0)
        documents = np.repeat(np.arange(lengths.size), held)
        starts = (rank + self.ranks * count_up(held)) * self.stripe
        return documents, starts, np.minimum(starts + self.stripe, lengths[documents])

    def most_spans_of(self, lengths: Ints) -> Ints:
        return -(-lengths // self.stripe)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        lengths = np.diff(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            index, stripes = enumerated(starts // self.stripe, (stops - 1) // self.stripe)
            start = stripes * self.stripe
            stop = np.minimum(start + self.stripe, lengths[documents[index]])
            return HeldSpans(index, stripes % self.ranks, start, stop)

        return lookup

    def counts(self, cu_seqlens: Ints) -> Counts:
        lengths = np.diff(cu_seqlens)
        full, rest = lengths // self.stripe, lengths % self.stripe
        stripes = full + (rest > 0)
        tokens = self.stripe * self._dealt(full)
        np.add.at(tokens, full % self.ranks, rest)
        runs = self._above(np.minimum(stripes, self.ranks))
        # With a single rank, all stripes of a document are adjacent and form one span.
        spans = self._dealt(stripes) if self.ranks > 1 else runs
        begun = np.where(np.arange(self.ranks) == 0, runs, 0)
        return Counts(tokens, spans, runs, spans - begun)

    def _dealt(self, numbers: Ints) -> Ints:
        """Return how many items each rank gets in total, (ranks,).

        For each n in `numbers`, the ranks in turn get n items, beginning with rank 0.
        """
        return int((numbers // self.ranks).sum()) + self._above(numbers % self.ranks)

    def _above(self, numbers: Ints) -> Ints:
        """Return, for each rank r, how many of `numbers` are larger than r, (ranks,)."""
        return numbers.size - np.cumsum(np.bincount(numbers, minlength=self.ranks))[: self.ranks]


@dataclass(frozen=True)
class EvenStripes(CountedCut):
    """A cut that divides the pack into stripes, regardless of documents. Rank s mod P holds stripe
    s.

    The last P stripes are smaller, so that all ranks hold the same number of tokens.
    """

    ranks: int
    stripe: int
    most_spans: ClassVar[int | None] = None

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        deal = self._deal(cu_seqlens)
        numbers = rank + self.ranks * np.arange(-(-deal.per_rank // self.stripe))
        edges = (np.minimum(deal.edge(x), cu_seqlens[-1]) for x in (numbers, numbers + 1))
        return split_at(cu_seqlens, *edges)

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, lengths // self.stripe + self.ranks + 2)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        deal = self._deal(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            begins = cu_seqlens[documents]
            first, last = (self._numbers(deal, begins + x) for x in (starts, stops - 1))
            index, numbers = enumerated(first, last)
            start, stop = (deal.edge(n) - begins[index] for n in (numbers, numbers + 1))
            start, stop = np.maximum(start, starts[index]), np.minimum(stop, stops[index])
            return HeldSpans(index, numbers % self.ranks, start, stop)

        return lookup

    def counts(self, cu_seqlens: Ints) -> Counts:
        deal, held = self._deal(cu_seqlens), np.flatnonzero(np.diff(cu_seqlens))
        first, last = (self._numbers(deal, x) for x in (cu_seqlens[held], cu_seqlens[held + 1] - 1))
        turn, stripes = first % self.ranks, last - first + 1
        runs = self._around(turn, np.minimum(stripes, self.ranks))
        spans = self._around(turn, stripes) if self.ranks > 1 else runs
        begun = np.bincount(turn, minlength=self.ranks)
        tokens = deal.before(cu_seqlens[-1:]).dealt_to(np.arange(self.ranks))
        return Counts(tokens, spans, runs, spans - begun)

    def _around(self, first: Ints, numbers: Ints) -> Ints:
        """Return how many items each rank gets in total, (ranks,).

        For each n in `numbers`, the ranks in turn get n items. `first` has, for each n, the rank
        that gets the first item.
        """
        rest, size = numbers % self.ranks, 2 * self.ranks
        steps = np.bincount(first, minlength=size) - np.bincount(first + rest, minlength=size)
        twice = np.cumsum(steps).reshape(2, -1).sum(0)
        return int((numbers // self.ranks).sum()) + twice

    def _deal(self, cu_seqlens: Ints) -> Deal:
        return Deal(int(cu_seqlens[-1]), self.ranks, self.stripe)

    def _numbers(self, deal: Deal, index: Ints) -> Ints:
        before = deal.before(index)
        return before.dealt // self.stripe * self.ranks + before.turn
