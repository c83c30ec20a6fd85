"""Zigzag cuts: each rank holds an early chunk and a late chunk of each document.

With a zigzag cut and a causal mask, all ranks have about the same work. With `EvenZigzag`, all
ranks also hold the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import enumerated
from seqpar.layout.cuts.cut import Columns, CountedCut, Counts, HeldSpans, HolderLookup, nonempty
from seqpar.layout.cuts.dealing import Deal, DealtBefore

_BLOCK_ELEMENTS = 2**16  # limit for the arrays that `Zigzag.counts` compares at once


@dataclass(frozen=True)
class Zigzag(CountedCut):
    """A cut that divides a document of L tokens at ⌊cL/2P⌋ into 2P chunks. Rank c of P ranks holds
    the chunks c and 2P − 1 − c.
    """

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
        # 32-bit integers take half the time of 64-bit integers.
        longest = int(lengths.max(initial=0))
        small = longest < 2**28 and longest * chunks < 2**31
        lengths = lengths.astype(np.int32 if small else np.int64)
        return lengths[:, None] * np.arange(chunks + 1, dtype=lengths.dtype) // chunks

    def counts(self, cu_seqlens: Ints) -> Counts:
        # A document has L = a·2P + b tokens, with b < 2P. Each of its chunks has a or a + 1 tokens.
        # Chunk c has a + 1 tokens if chunk c of a document of b tokens has one token. Documents
        # with the same b are therefore counted together. Documents of fewer than 2P tokens (short)
        # have empty chunks.
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
            # In a document of b tokens, chunk c has a token if there is a multiple of 2P that is
            # greater than c·b and at most (c + 1)·b. The mirrored chunk 2P − 1 − c has a token if
            # there is a multiple of 2P that is at least c·b and less than (c + 1)·b.
            leaves, passes = remainder == 0, remainder + b >= chunks
            both = passes.astype(np.float64) + (leaves | (remainder + b > chunks))
            some = (leaves | passes).astype(np.float64)
            found.append(np.concatenate([weights @ both.T, weights[1:] @ some.T]))
        of_all, of_short, runs = np.concatenate(found, axis=1).astype(np.int64)
        longs = int(is_long.sum())
        tokens = of_all + 2 * int((lengths // chunks).sum())
        spans = of_short + 2 * longs
        spans[-1] -= longs  # the two chunks of the last rank are adjacent and form one span
        # The two tokens in the middle of a short document may be on the same rank.
        left, right = (self._owner(short, short // 2 + side) for side in (-1, 0))
        np.subtract.at(spans, left[(left == right) & (short > 1)], 1)
        begun = np.bincount(self._owner(short, np.zeros_like(short)), minlength=self.ranks)
        begun[0] += longs
        return Counts(tokens, spans, runs + longs, spans - begun)

    def _owner(self, lengths: Ints, positions: Ints) -> Ints:
        chunk = _chunk(lengths, positions, 2 * self.ranks)
        return np.minimum(chunk, 2 * self.ranks - 1 - chunk)


def _chunk(lengths: Ints, positions: Ints, chunks: int) -> Ints:
    """Return the index of the chunk that contains each position. Chunk c begins at
    ⌊c·length/chunks⌋.
    """
    return -(-(positions + 1) * chunks // lengths) - 1


class _ChunkSizes(NamedTuple):
    """The sizes of the two chunks of each document on each rank, in a zigzag cut.

    Rank c has n_c tokens of a document, in two chunks. The chunk that is nearer to the start of the
    document has ⌊(n_c + up)/2⌋ tokens. The tokens of the documents are dealt to the ranks one after
    another, like cards. `first` has the number of tokens that each rank has before a document is
    dealt, and `last` has the number after this document is dealt.
    """

    lengths: Ints
    first: DealtBefore
    last: DealtBefore
    up: Ints

    def tokens(self, ranks: int | Ints) -> Ints:
        return self.last.dealt_to(ranks) - self.first.dealt_to(ranks)

    def low(self, tokens: Ints) -> Ints:
        return (tokens + self.up) // 2

    def take(self, chosen: Ints) -> _ChunkSizes:
        first, last = self.first.take(chosen), self.last.take(chosen)
        return _ChunkSizes(self.lengths[chosen], first, last, self.up[chosen])

    def equal_ranks(self, behind: int | Ints) -> tuple[Ints, Ints]:
        """Divide the ranks 0 … `behind` − 1 into five groups, separately for each document.

        A group consists of consecutive ranks with the same number of tokens of the document. Return
        the edges of the groups, (6, documents), and the number of tokens per rank in each group,
        (5, documents).
        """
        # Five groups suffice: in a round, all ranks get the same number of tokens of a document,
        # except for two ranks, which are those whose turn it is when the document begins and when
        # it ends.
        turns = self.first.turn, self.last.turn
        low = np.minimum(*turns)
        high = np.maximum(np.maximum(*turns), low + 1)
        rows = np.zeros_like(low), low, low + 1, high, high + 1, np.full_like(low, behind)
        borders = np.minimum(np.stack(rows), behind)
        return borders, self.tokens(borders[:-1])

    def chunks(self, rank: int | Ints) -> tuple[Ints, Ints]:
        """Return the starts and the stops of a rank's two chunks of each document, (2 · documents,)
        each.

        In the arrays, the low chunk of a document comes first, and its high chunk follows.
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
class EvenZigzag(CountedCut):
    """A zigzag cut in which all ranks have the same number of tokens.

    Each document is cut into 2P chunks: a low chunk and a high chunk for each rank. From the start
    of the document, the low chunks of the ranks 0, 1, … P − 1 come first, and the high chunks of
    the ranks P − 1, … 1, 0 follow. To find the number n_c of tokens of a document on rank c, the
    tokens of all documents are dealt to the ranks one by one (`dealing.py`). Each chunk of rank c
    has n_c / 2 tokens. If n_c is odd, one of the two chunks has one more token: the high chunk in
    every second document, and the low chunk in all other documents.

    A document of fewer than 2P·min_chunk tokens is *short*. Short documents are dealt after all
    longer documents, from the longest to the shortest, in ranges of 2·min_chunk tokens instead of
    single tokens. A short document is therefore on one rank or on a few ranks, and ranges that are
    dealt one after another have about the same work.
    """

    ranks: int
    min_chunk: int = 0
    most_spans: ClassVar[int | None] = 2

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        every = self._chunk_sizes(cu_seqlens)
        documents = np.flatnonzero(every.tokens(rank))
        starts, stops = every.take(documents).chunks(rank)
        kept = stops > starts
        return np.repeat(documents, 2)[kept], starts[kept], stops[kept]

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, 2 * self.ranks)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        every = self._chunk_sizes(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            first, last = every.first.take(documents), every.last.take(documents)
            # A document is on consecutive ranks, beginning with the rank whose turn it is. The
            # document may take several rounds.
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
        sizes = self._chunk_sizes(cu_seqlens)
        borders, tokens = sizes.equal_ranks(self.ranks)
        tokens[borders[:-1] == borders[1:]] = 0  # groups without ranks

        def on_ranks(numbers: Ints) -> Ints:
            """Return, for each rank, the sum of `numbers` over the groups that contain the rank."""
            begin, end = (
                np.bincount(edges.ravel(), numbers.ravel(), self.ranks + 1)
                for edges in (borders[:-1], borders[1:])
            )
            return np.cumsum(begin - end)[:-1].astype(np.int64)

        documents = np.flatnonzero(sizes.lengths)
        last = len(tokens) - 1 - np.argmax(tokens[::-1] > 0, axis=0)[documents]
        highest, of_highest = borders[last + 1, documents] - 1, tokens[last, documents]
        spans = on_ranks(np.minimum(tokens, 2))
        # The two chunks of the highest rank are adjacent and form one span.
        spans -= np.bincount(highest[of_highest > 1], minlength=self.ranks)
        low = np.where(tokens > 0, sizes.low(tokens), 0)[:, documents]
        begins = borders[np.argmax(low > 0, axis=0), documents]
        begins = np.where(low.any(0), begins, highest)  # the rank that holds position 0
        begun = np.bincount(begins, minlength=self.ranks)
        return Counts(on_ranks(tokens), spans, on_ranks(np.sign(tokens)), spans - begun)

    def _chunk_sizes(self, cu_seqlens: Ints) -> _ChunkSizes:
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
        return _ChunkSizes(lengths, deal.before(begin), deal.before(begin + lengths), number % 2)
