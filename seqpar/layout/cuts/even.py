"""Cuts that give every rank as many tokens, by dealing the tokens of the pack to ranks.

Of T tokens each of P ranks gets ⌈T/P⌉, or fewer by less than P in all, whatever the documents are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_int, as_ranks, parse_cu_seqlens
from seqpar.core.ranges import count_up, enumerated, split_at
from seqpar.layout.cuts.cuts import Columns, Counts, HeldSpans, HolderLookup
from seqpar.layout.cuts.round_robin import Deal, RowPlaces


class _Shares(NamedTuple):
    """What ranks get of documents: rank c of each n_c tokens, ⌊(n_c + up)/2⌋ in its low chunk."""

    lengths: Ints
    first: RowPlaces
    last: RowPlaces
    up: Ints

    def tokens(self, ranks: int | Ints) -> Ints:
        """Return n_c of each document for the given rank, or ranks."""
        return self.last.dealt_to(ranks) - self.first.dealt_to(ranks)

    def low(self, tokens: Ints) -> Ints:
        """Return how many of so many tokens of each document are in the low chunk."""
        return (tokens + self.up) // 2

    def take(self, chosen: Ints) -> _Shares:
        return _Shares(
            self.lengths[chosen],
            self.first.take(chosen),
            self.last.take(chosen),
            self.up[chosen],
        )

    def equal_ranks(self, behind: int | Ints) -> tuple[Ints, Ints]:
        """Return the borders between the ranks below `behind` that get unequal shares.

        They are (6, documents) and ascend from 0 to `behind`. Return (5, documents) too: n_c of the
        ranks between. There are no more, since ranks get alike in a round, but for the ones whose
        turn it is when the document begins and ends.
        """
        turns = self.first.turn, self.last.turn
        low = np.minimum(*turns)
        high = np.maximum(np.maximum(*turns), low + 1)
        rows = np.zeros_like(low), low, low + 1, high, high + 1, np.full_like(low, behind)
        borders = np.minimum(np.stack(rows), behind)
        return borders, self.tokens(borders[:-1])

    def chunks(self, rank: int | Ints) -> tuple[Ints, Ints]:
        """Return where the low and the high chunk of each document start and stop, in turn.

        The chunks are those of one rank, or of one rank for each document.
        """
        borders, tokens = self.equal_ranks(rank)
        low_start = (self.low(tokens) * np.diff(borders, axis=0)).sum(0)
        below = self.last.dealt_below(rank) - self.first.dealt_below(rank)
        high_stop = self.lengths - (below - low_start)
        tokens = self.tokens(rank)
        low = self.low(tokens)
        starts = np.stack([low_start, high_stop - (tokens - low)], 1).ravel()
        return starts, np.stack([low_start + low, high_stop], 1).ravel()


@dataclass(frozen=True)
class EvenZigzag:
    """Zigzag, with as many tokens on each rank.

    Tokens are dealt to ranks singly, which settles only how many of each document a rank gets, n_c.
    The document is then cut into the low chunks of rank 0 … P − 1, of n_c/2 tokens, and the high
    chunks of rank P − 1 … 0, of the others. Where n_c is odd the high chunk is the longer one in
    the first document dealt, the low chunk in the second, and so on in turn. So a rank has, but for
    a token, the same part of each document and of its causal work.

    Documents of fewer than 2P·min_chunk tokens are dealt behind all others, and in parts of
    2·min_chunk tokens. So such a document is on few ranks, or whole on one. They are dealt longest
    first, so that the ranks' parts of a round have about the same work.
    """

    ranks: int
    min_chunk: int = 0
    alike: ClassVar[bool] = False
    most_spans: ClassVar[int | None] = 2

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        """Return the spans that a rank holds."""
        every = self._shares(cu_seqlens)
        documents = np.flatnonzero(every.tokens(rank))
        starts, stops = every.take(documents).chunks(rank)
        kept = stops > starts
        return np.repeat(documents, 2)[kept], starts[kept], stops[kept]

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        return self.counts(cu_seqlens).tokens

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, 2 * self.ranks)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        every = self._shares(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            first, last = every.first.take(documents), every.last.take(documents)
            # A document goes to consecutive ranks, from the one whose turn it is, once around or
            # more often.
            turns = np.full_like(documents, self.ranks)
            in_next = last.dealt == first.dealt + first.part
            turns[in_next] -= np.maximum(first.turn - last.turn - 1, 0)[in_next]
            in_same = last.dealt == first.dealt
            turns[in_same] = (last.turn - first.turn + 1)[in_same]
            index = np.repeat(np.arange(turns.size), turns)
            owners = (first.turn[index] + count_up(turns)) % self.ranks
            begins, ends = every.take(documents[index]).chunks(owners)
            return HeldSpans(np.repeat(index, 2), np.repeat(owners, 2), begins, ends).nonempty()

        return lookup

    def mirrored_edges(self, lengths: Ints) -> None:
        return None

    def counts(self, cu_seqlens: Ints) -> Counts:
        """Return what each rank holds, in numbers."""
        shares = self._shares(cu_seqlens)
        borders, tokens = shares.equal_ranks(self.ranks)
        tokens[borders[:-1] == borders[1:]] = 0  # those of no rank

        def on_ranks(numbers: Ints) -> Ints:
            """Return (ranks,): the sum over documents of what the ranks between borders have."""
            steps = [
                np.bincount(edges.ravel(), numbers.ravel(), self.ranks + 1)
                for edges in (borders[:-1], borders[1:])
            ]
            return np.cumsum(steps[0] - steps[1])[:-1].astype(np.int64)

        documents = np.flatnonzero(shares.lengths)
        last = len(tokens) - 1 - np.argmax(tokens[::-1] > 0, axis=0)[documents]
        highest, of_highest = borders[last + 1, documents] - 1, tokens[last, documents]
        spans = on_ranks(np.minimum(tokens, 2))
        spans -= np.bincount(highest[of_highest > 1], minlength=self.ranks)  # its chunks touch
        low = np.where(tokens > 0, shares.low(tokens), 0)[:, documents]
        begins = borders[np.argmax(low > 0, axis=0), documents]
        begins = np.where(low.any(0), begins, highest)  # the rank that holds position 0
        begun = np.bincount(begins, minlength=self.ranks)
        return Counts(on_ranks(tokens), spans, on_ranks(np.sign(tokens)), spans - begun)

    def _shares(self, cu_seqlens: Ints) -> _Shares:
        lengths, total = np.diff(cu_seqlens), int(cu_seqlens[-1])
        begin, number = cu_seqlens[:-1], np.arange(lengths.size)
        deal = Deal(total, self.ranks, 1)
        if self.min_chunk:
            part = 2 * self.min_chunk
            short = lengths < part * self.ranks
            order = np.argsort(np.where(short, -lengths, -(2**62)), kind="stable")
            begin, number = np.empty_like(lengths), np.empty_like(lengths)
            begin[order] = np.cumsum(lengths[order]) - lengths[order]
            number[order] = np.arange(order.size)
            deal = Deal(total, self.ranks, part, -(-int(lengths[~short].sum()) // self.ranks))
        return _Shares(lengths, deal.place(begin), deal.place(begin + lengths), number % 2)


@dataclass(frozen=True)
class EvenStripes:
    """Stripes that are counted through the pack; rank s mod P holds stripe s.

    The last round has smaller stripes, so that each rank holds as many tokens.
    """

    ranks: int
    stripe: int
    alike: ClassVar[bool] = False
    most_spans: ClassVar[int | None] = None

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        """Return the spans that a rank holds."""
        starts, stops = np.minimum(self._deal(cu_seqlens).parts(rank), cu_seqlens[-1])
        return split_at(cu_seqlens, starts, stops)

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        return self.counts(cu_seqlens).tokens

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, lengths // self.stripe + self.ranks + 2)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        deal = self._deal(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            begins = cu_seqlens[documents]
            first, last = (deal.number_at(begins + x) for x in (starts, stops - 1))
            index, numbers = enumerated(first, last)
            start, stop = (deal.edge(n) - begins[index] for n in (numbers, numbers + 1))
            start, stop = np.maximum(start, starts[index]), np.minimum(stop, stops[index])
            return HeldSpans(index, numbers % self.ranks, start, stop)

        return lookup

    def mirrored_edges(self, lengths: Ints) -> None:
        return None

    def counts(self, cu_seqlens: Ints) -> Counts:
        """Return what each rank holds, in numbers."""
        deal, held = self._deal(cu_seqlens), np.flatnonzero(np.diff(cu_seqlens))
        first = deal.place(cu_seqlens[held])
        last = deal.place(cu_seqlens[held + 1] - 1)
        rounds = (last.dealt - first.dealt) // self.stripe
        # A document's stripes are consecutive: it begins on one rank and goes around.
        stripes = rounds * self.ranks + last.turn - first.turn + 1
        runs = self._around(first.turn, np.minimum(stripes, self.ranks))
        spans = self._around(first.turn, stripes) if self.ranks > 1 else runs
        begun = np.bincount(first.turn, minlength=self.ranks)
        tokens = deal.place(cu_seqlens[-1:]).dealt_to(np.arange(self.ranks))
        return Counts(tokens, spans, runs, spans - begun)

    def _around(self, first: Ints, numbers: Ints) -> Ints:
        """Return how many each rank gets if so many are dealt, each time from a first rank on."""
        rest, size = numbers % self.ranks, 2 * self.ranks
        steps = np.bincount(first, minlength=size) - np.bincount(first + rest, minlength=size)
        twice = np.cumsum(steps).reshape(2, -1).sum(0)
        return int((numbers // self.ranks).sum()) + twice

    def _deal(self, cu_seqlens: Ints) -> Deal:
        return Deal(int(cu_seqlens[-1]), self.ranks, self.stripe)


def padded(
    cu_seqlens: CuSeqlens, ranks: int, equal: bool, multiple_of: int
) -> tuple[Ints, int, int]:
    """Return cu_seqlens with a last document of padding, if `equal`; ranks; tokens of padding.

    Raise a ValueError that names a wrong argument.
    """
    cu, ranks = parse_cu_seqlens(cu_seqlens), as_ranks("ranks", ranks)
    multiple_of = as_int("multiple_of", multiple_of, 1)
    if not as_bool("equal", equal):
        if multiple_of > 1:
            raise ValueError(f"multiple_of needs equal=True, got {multiple_of}")
        return cu, ranks, 0
    tokens = int(cu[-1])
    total = -(-tokens // (ranks * multiple_of)) * ranks * multiple_of
    if total - tokens >= 2**31:
        raise ValueError(
            f"multiple_of must leave less than 2**31 tokens of padding, got {multiple_of}"
        )
    return np.r_[cu, total], ranks, total - tokens
