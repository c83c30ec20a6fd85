"""Zigzag: each rank holds an early and a late chunk of each document.

Under a causal mask all ranks then have about the same work. In `EvenZigzag` all ranks also hold the
same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import enumerated
from seqpar.layout.cuts.cut import Columns, CountedCut, Counts, HeldSpans, HolderLookup, nonempty
from seqpar.layout.cuts.dealing import Deal, RowPlaces

_BLOCK_ELEMENTS = 2**16  # `Zigzag.counts` compares at most this many chunks and remainders at once


@dataclass(frozen=True)
class Zigzag(CountedCut):
    """A document of L tokens is cut into 2P chunks at ⌊cL/2P⌋; rank c holds chunks c and 2P−1−c."""

    ranks: int
    alike: ClassVar[bool] = True
    most_spans: ClassVar[int | None] = 2

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        lengths, chunks = np.diff(cu_seqlens), 2 * self.ranks
        numbers = rank, rank + 1, chunks - 1 - rank, chunks - rank
        edges = np.stack([lengths * c // chunks for c in numbers], 1).reshape(-1, 2)
        return nonempty(np.repeat(np.arange(lengths.size), 2), edges[:, 0], edges[:, 1])

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, 2 * self.ranks)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        lengths, chunks = np.diff(cu_seqlens), 2 * self.ranks

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            whole = lengths[documents]
            first, last = (_chunk(whole, x, chunks) for x in (starts, stops - 1))
            index, numbers = enumerated(first, last)
            start, stop = (whole[index] * c // chunks for c in (numbers, numbers + 1))
            owners = np.minimum(numbers, chunks - 1 - numbers)
            return HeldSpans(index, owners, start, stop).nonempty()

        return lookup

    def mirrored_edges(self, lengths: Ints) -> Ints:
        chunks = 2 * self.ranks
        # 32-bit arithmetic takes half as long as 64-bit.
        longest = int(lengths.max(initial=0))
        small = longest < 2**28 and longest * chunks < 2**31
        lengths = lengths.astype(np.int32 if small else np.int64)
        return lengths[:, None] * np.arange(chunks + 1, dtype=lengths.dtype) // chunks

    def counts(self, cu_seqlens: Ints) -> Counts:
        # A document has L = a·2P + b tokens, with b < 2P. Each chunk has a tokens, or a + 1. The
        # chunks of a + 1 tokens are those in which a document of b tokens would have one token.
        # Documents with equal b are therefore counted together. Short documents, which have fewer
        # than 2P tokens, have empty chunks.
        lengths, chunks = np.diff(cu_seqlens), 2 * self.ranks
        rest, is_long = lengths % chunks, lengths >= chunks
        short = lengths[~is_long & (lengths > 0)]
        b, members = np.unique(rest[rest > 0], return_inverse=True)
        in_short = np.bincount(members, ~is_long[rest > 0], b.size)
        weights = np.stack([np.bincount(members, minlength=b.size), in_short])
        b = b.astype(np.int32 if self.ranks * chunks < 2**31 else np.int64)
        rows, found = max(1, _BLOCK_ELEMENTS // max(b.size, 1)), []
        for first in range(0, self.ranks, rows):
            c = np.arange(first, min(first + rows, self.ranks), dtype=b.dtype)[:, None]
            remainder = c * b % chunks
            # In a document of b tokens, chunk c has a token if c·b is a multiple of 2P, or if
            # (c + 1)·b passes one. The mirrored chunk has a token if c·b is a multiple of 2P, or
            # if (c + 1)·b passes a multiple without ending on it.
            leaves, passes = remainder == 0, remainder + b >= chunks
            both = passes.astype(np.float64) + (leaves | (remainder + b > chunks))
            some = (leaves | passes).astype(np.float64)
            found.append(np.concatenate([weights @ both.T, weights[1:] @ some.T]))
        of_all, of_short, runs = np.concatenate(found, axis=1).astype(np.int64)
        longs = int(is_long.sum())
        tokens = of_all + 2 * int((lengths // chunks).sum())
        spans = of_short + 2 * longs
        spans[-1] -= longs  # the two chunks of the last rank touch in the middle
        # The two tokens on both sides of a short document's middle may be on one rank.
        left, right = (self._owner(short, short // 2 + side) for side in (-1, 0))
        np.subtract.at(spans, left[(left == right) & (short > 1)], 1)
        begun = np.bincount(self._owner(short, np.zeros_like(short)), minlength=self.ranks)
        begun[0] += longs
        return Counts(tokens, spans, runs + longs, spans - begun)

    def _owner(self, lengths: Ints, positions: Ints) -> Ints:
        chunk = _chunk(lengths, positions, 2 * self.ranks)
        return np.minimum(chunk, 2 * self.ranks - 1 - chunk)


def _chunk(lengths: Ints, positions: Ints, chunks: int) -> Ints:
    """Return the chunk that holds a position if chunk c begins at ⌊c·length/chunks⌋."""
    return -(-(positions + 1) * chunks // lengths) - 1


class _Shares(NamedTuple):
    """The number of tokens of each document on each rank, and in the rank's low chunk.

    Rank c has n_c tokens of a document, of which ⌊(n_c + up)/2⌋ are in its low chunk.
    """

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
        """Divide the ranks below `behind`, for each document, into five groups with equal n_c.

        Return the first rank of each group and the end of the last, (6, documents), and n_c, (5,
        documents).
        """
        # Five groups suffice. In a round all ranks get the same number of tokens of a document,
        # except for two ranks: those whose turn it is when the document begins and when it ends.
        turns = self.first.turn, self.last.turn
        low = np.minimum(*turns)
        high = np.maximum(np.maximum(*turns), low + 1)
        rows = np.zeros_like(low), low, low + 1, high, high + 1, np.full_like(low, behind)
        borders = np.minimum(np.stack(rows), behind)
        return borders, self.tokens(borders[:-1])

    def chunks(self, rank: int | Ints) -> tuple[Ints, Ints]:
        """Return the starts, (documents, 2), and the stops of one rank's low and high chunks."""
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

    Tokens are dealt to ranks one by one. This determines n_c, the number of tokens of a document on
    rank c. Each rank's n_c tokens are divided into a low and a high chunk of n_c/2 tokens each.
    From its start to its end, a document consists of the low chunks of ranks 0 … P − 1, then the
    high chunks of ranks P − 1 … 0. If n_c is odd, the high chunk is longer in every second
    document, and the low chunk in the documents between. Up to one token, a rank therefore has the
    same fraction of each document and of the document's causal work.

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
            # A document is on consecutive ranks, starting with the rank whose turn it is. It may
            # take several rounds.
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
            """Return (ranks,) sums over documents. Each rank counts the number of its group."""
            begin, end = (
                np.bincount(edges.ravel(), numbers.ravel(), self.ranks + 1)
                for edges in (borders[:-1], borders[1:])
            )
            return np.cumsum(begin - end)[:-1].astype(np.int64)

        documents = np.flatnonzero(shares.lengths)
        last = len(tokens) - 1 - np.argmax(tokens[::-1] > 0, axis=0)[documents]
        highest, of_highest = borders[last + 1, documents] - 1, tokens[last, documents]
        spans = on_ranks(np.minimum(tokens, 2))
        # The two chunks of the highest rank touch in the middle of the document.
        spans -= np.bincount(highest[of_highest > 1], minlength=self.ranks)
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
