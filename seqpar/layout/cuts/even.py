"""Cuts that give every rank the same number of tokens, by dealing out the tokens of the pack.

Each of P ranks gets n = ⌈T/P⌉ of T tokens, whatever the documents are. If T < P·n, fewer than P
tokens are missing at the end of the pack. In a round each rank in turn gets an equal part of
consecutive tokens; parts of the last round are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_int, as_ranks, parse_cu_seqlens
from seqpar.core.ranges import enumerated, split_at
from seqpar.layout.cuts.cuts import Columns, CountedCut, Counts, HeldSpans, HolderLookup


class RowPlaces(NamedTuple):
    """Places in the pack, as arrays."""

    dealt: Ints  # number of tokens that each rank got in earlier rounds
    offset: Ints  # number of tokens of this round before the place
    part: Ints  # number of tokens that each rank gets in this round

    def dealt_to(self, rank: int | Ints) -> Ints:
        """Count the tokens before the place that a rank gets."""
        in_round = np.maximum(self.offset - rank * self.part, 0)
        return self.dealt + np.minimum(in_round, self.part)  # np.clip takes several times as long

    def dealt_below(self, rank: int | Ints) -> Ints:
        """Count the tokens before the place that ranks 0 … `rank` − 1 get together."""
        return self.dealt * rank + np.minimum(self.offset, rank * self.part)

    def take(self, chosen: Ints) -> RowPlaces:
        return RowPlaces(*(values[chosen] for values in self))

    @property
    def turn(self) -> Ints:
        """The rank whose turn it is. Only lower ranks have their part of the round already."""
        return self.offset // self.part


class Deal:
    """T tokens dealt to P ranks: first one by one, `singles` per rank, then in larger parts.

    All counts are closed forms, without an entry per round or document.
    """

    def __init__(self, tokens: int, ranks: int, part: int, singles: int = 0) -> None:
        self.ranks = ranks
        self.per_rank = -(-tokens // ranks)
        singles = min(singles, self.per_rank)
        rounds, rest = divmod(self.per_rank - singles, part)
        # For each of three kinds of rounds: the tokens that each rank has before, and the size of a
        # part. If the rest is 0, the last kind has no tokens, and its parts may have any size.
        self._begin = np.array([0, singles, singles + rounds * part])
        self._part = np.array([1, part, max(rest, 1)])
        self._first_number = np.array([0, singles, singles + rounds]) * ranks  # of each kind

    def place(self, row: Ints) -> RowPlaces:
        """Return the places of the given indices of the pack, each from 0 to T."""
        kind = np.searchsorted(self._begin[1:] * self.ranks, row, side="right")
        begin, part = self._begin[kind], self._part[kind]
        rounds, offset = np.divmod(row - begin * self.ranks, part * self.ranks)
        return RowPlaces(begin + rounds * part, offset, part)

    def edge(self, number: Ints) -> Ints:
        """Return the place at which each part begins; rank n mod P gets part n."""
        kind = np.searchsorted(self._first_number[1:], number, side="right")
        begin = self._begin[kind] * self.ranks
        return begin + (number - self._first_number[kind]) * self._part[kind]


class _Shares(NamedTuple):
    """Each rank's share of each document: n_c tokens on rank c, ⌊(n_c + up)/2⌋ in its low chunk."""

    lengths: Ints
    first: RowPlaces
    last: RowPlaces
    up: Ints

    def tokens(self, ranks: int | Ints) -> Ints:
        return self.last.dealt_to(ranks) - self.first.dealt_to(ranks)

    def low(self, tokens: Ints) -> Ints:
        return (tokens + self.up) // 2

    def take(self, chosen: Ints) -> _Shares:
        first, last = self.first.take(chosen), self.last.take(chosen)
        return _Shares(self.lengths[chosen], first, last, self.up[chosen])

    def equal_ranks(self, behind: int | Ints) -> tuple[Ints, Ints]:
        """Return the borders (6, documents) and n_c (5, documents) of groups of equal ranks.

        The groups divide the ranks below `behind`.
        """
        # Five suffice: in a round all ranks get the same number, except for the ranks whose turn it
        # is when the document begins and ends.
        turns = self.first.turn, self.last.turn
        low = np.minimum(*turns)
        high = np.maximum(np.maximum(*turns), low + 1)
        rows = np.zeros_like(low), low, low + 1, high, high + 1, np.full_like(low, behind)
        borders = np.minimum(np.stack(rows), behind)
        return borders, self.tokens(borders[:-1])

    def chunks(self, rank: int | Ints) -> tuple[Ints, Ints]:
        """Return (documents, 2) starts and stops of one rank's low and high chunks."""
        borders, tokens = self.equal_ranks(rank)
        low_start = (self.low(tokens) * np.diff(borders, axis=0)).sum(0)
        below = self.last.dealt_below(rank) - self.first.dealt_below(rank)
        high_stop = self.lengths - (below - low_start)
        tokens = self.tokens(rank)
        low = self.low(tokens)
        starts = np.stack([low_start, high_stop - (tokens - low)], 1).ravel()
        return starts, np.stack([low_start + low, high_stop], 1).ravel()


@dataclass(frozen=True)
class EvenZigzag(CountedCut):
    """Zigzag with the same number of tokens on each rank.

    Tokens are dealt to ranks one by one, which determines n_c, the tokens of a document on rank c.
    The document is then cut into the low chunks of ranks 0 … P − 1, of n_c/2 tokens, and the high
    chunks of ranks P − 1 … 0. If n_c is odd, high and low chunks are longer in alternate documents.
    A rank therefore has the same part of each document and of its causal work, except for one
    token.

    Documents of fewer than 2P·min_chunk tokens are dealt after all others, longest first, in parts
    of 2·min_chunk tokens. Such a document is on few ranks, or whole on one, and the parts of a
    round have about the same work.
    """

    ranks: int
    min_chunk: int = 0
    most_spans: ClassVar[int | None] = 2

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        every = self._shares(cu_seqlens)
        documents = np.flatnonzero(every.tokens(rank))
        starts, stops = every.take(documents).chunks(rank)
        kept = stops > starts
        return np.repeat(documents, 2)[kept], starts[kept], stops[kept]

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, 2 * self.ranks)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        every = self._shares(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            first, last = every.first.take(documents), every.last.take(documents)
            # A document goes to consecutive ranks, starting with the rank whose turn it is, for one
            # round or more.
            turns = np.full_like(documents, self.ranks)
            in_next = last.dealt == first.dealt + first.part
            turns[in_next] -= np.maximum(first.turn - last.turn - 1, 0)[in_next]
            in_same = last.dealt == first.dealt
            turns[in_same] = (last.turn - first.turn + 1)[in_same]
            index, turn = enumerated(first.turn, first.turn + turns - 1)
            owners = turn % self.ranks
            begins, ends = every.take(documents[index]).chunks(owners)
            return HeldSpans(np.repeat(index, 2), np.repeat(owners, 2), begins, ends).nonempty()

        return lookup

    def counts(self, cu_seqlens: Ints) -> Counts:
        shares = self._shares(cu_seqlens)
        borders, tokens = shares.equal_ranks(self.ranks)
        tokens[borders[:-1] == borders[1:]] = 0  # groups without ranks

        def on_ranks(numbers: Ints) -> Ints:
            """Return (ranks,) sums over documents of the numbers of each rank's group."""
            begin, end = (
                np.bincount(edges.ravel(), numbers.ravel(), self.ranks + 1)
                for edges in (borders[:-1], borders[1:])
            )
            return np.cumsum(begin - end)[:-1].astype(np.int64)

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
class EvenStripes(CountedCut):
    """Stripes that are counted through the pack, not per document; rank s mod P holds stripe s.

    The last round has smaller stripes, so that each rank holds the same number of tokens.
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
        tokens = deal.place(cu_seqlens[-1:]).dealt_to(np.arange(self.ranks))
        return Counts(tokens, spans, runs, spans - begun)

    def _around(self, first: Ints, numbers: Ints) -> Ints:
        """Return how many items each rank gets if each of `numbers` is dealt from `first` on."""
        rest, size = numbers % self.ranks, 2 * self.ranks
        steps = np.bincount(first, minlength=size) - np.bincount(first + rest, minlength=size)
        twice = np.cumsum(steps).reshape(2, -1).sum(0)
        return int((numbers // self.ranks).sum()) + twice

    def _deal(self, cu_seqlens: Ints) -> Deal:
        return Deal(int(cu_seqlens[-1]), self.ranks, self.stripe)

    def _numbers(self, deal: Deal, row: Ints) -> Ints:
        """Return the numbers of the stripes that contain the given indices of the pack."""
        places = deal.place(row)
        return places.dealt // self.stripe * self.ranks + places.turn


def padded(
    cu_seqlens: CuSeqlens, ranks: int, equal: bool, multiple_of: int
) -> tuple[Ints, int, int]:
    """Return cu_seqlens, the ranks and the padding, which with `equal` is a last document."""
    cu, ranks = parse_cu_seqlens(cu_seqlens), as_ranks("ranks", ranks)
    multiple_of = as_int("multiple_of", multiple_of, 1)
    if not as_bool("equal", equal):
        if multiple_of > 1:
            raise ValueError(f"multiple_of needs equal=True, got {multiple_of}")
        return cu, ranks, 0
    tokens = int(cu[-1])
    total = -(-tokens // (ranks * multiple_of)) * ranks * multiple_of
    if total - tokens >= 2**31:
        limit = "less than 2**31 tokens of padding"
        raise ValueError(f"multiple_of must leave {limit}, got {multiple_of}")
    return np.r_[cu, total], ranks, total - tokens
