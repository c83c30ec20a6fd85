"""Ways of cutting a packed batch into the spans that each rank holds.

A cut stores the number of ranks and a few options. Spans are derived from `cu_seqlens` for one rank
at a time, so no array has the size of documents × ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up, enumerated, sort_keys

Columns = tuple[Ints, Ints, Ints]  # spans: their documents, starts and stops
_BLOCK_ELEMENTS = 2**16  # in each block of a table of comparisons


class Counts(NamedTuple):
    """(ranks,) numbers of tokens, spans, runs, and spans that do not begin their document."""

    tokens: Ints
    spans: Ints
    runs: Ints
    continued: Ints


class HeldSpans(NamedTuple):
    """Spans (spans,) and their ranks; `numbers` are indices into the caller's documents."""

    numbers: Ints
    owners: Ints
    starts: Ints
    stops: Ints

    def nonempty(self) -> HeldSpans:
        kept = np.flatnonzero(self.stops > self.starts)
        return HeldSpans(*(column[kept] for column in self))


# (documents, starts, stops), each (n,) -> the spans of all ranks that overlap these positions, and
# possibly other spans of the same documents. No range of positions is empty.
HolderLookup = Callable[[Ints, Ints, Ints], HeldSpans]


class Cut(Protocol):
    """The interface of all cuts. `alike`: the cut of a document depends only on its length."""

    @property
    def ranks(self) -> int: ...

    @property
    def alike(self) -> bool: ...

    @property
    def most_spans(self) -> int | None:
        """Largest number of spans of a document that a rank holds; None without a limit."""

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        """Return the nonempty spans that a rank holds, by document, then position."""

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        """Return (ranks,) the number of tokens that each rank holds."""

    def most_spans_of(self, lengths: Ints) -> Ints:
        """Return an upper limit on the spans of all ranks together, per document length."""

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        """Return a function that finds the ranks that hold given parts of documents."""

    def mirrored_edges(self, lengths: Ints) -> Ints | None:
        """Return (documents, 2P + 1) edges of chunks if each rank c holds chunks c and 2P − 1 − c.

        P is the number of ranks. Chunks may be empty. Returns None for all other cuts.
        """


class CountedCut:
    """The defaults of a cut that counts its tokens, and whose chunks are not mirrored."""

    alike: ClassVar[bool] = False

    def counts(self, cu_seqlens: Ints) -> Counts:
        raise NotImplementedError

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        return self.counts(cu_seqlens).tokens

    def mirrored_edges(self, lengths: Ints) -> Ints | None:
        return None


class TableCut(CountedCut):
    """A cut that can list the spans of all ranks."""

    def table(self, cu_seqlens: Ints) -> tuple[Ints, Columns]:
        """Return the index of each rank's first span, then the number of spans; and all spans."""
        raise NotImplementedError

    def counts(self, cu_seqlens: Ints) -> Counts:
        edges, (documents, starts, stops) = self.table(cu_seqlens)
        begins_run = np.r_[True, documents[1:] != documents[:-1]][: documents.size]
        begins_run[edges[edges < documents.size]] = True
        each = stops - starts, np.ones_like(starts), begins_run, starts > 0
        return Counts(*(np.diff(np.r_[0, np.cumsum(numbers)][edges]) for numbers in each))


@dataclass(frozen=True)
class Contiguous(TableCut):
    """Rank c holds tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the pack."""

    ranks: int
    most_spans: ClassVar[int | None] = 1

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        first, behind = (int(cu_seqlens[-1]) * c // self.ranks for c in (rank, rank + 1))
        begin = np.searchsorted(cu_seqlens, first, side="right") - 1
        documents = np.arange(begin, np.searchsorted(cu_seqlens, behind))
        start, stop = cu_seqlens[documents], cu_seqlens[documents + 1]
        starts, stops = np.maximum(start, first) - start, np.minimum(stop, behind) - start
        return _nonempty(documents, starts, stops)

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


@dataclass(frozen=True)
class Zigzag(CountedCut):
    """Each document of L tokens has 2P chunks, cut at ⌊cL/2P⌋; rank c holds chunks c and 2P−1−c."""

    ranks: int
    alike: ClassVar[bool] = True
    most_spans: ClassVar[int | None] = 2

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        lengths, chunks = np.diff(cu_seqlens), 2 * self.ranks
        numbers = rank, rank + 1, chunks - 1 - rank, chunks - rank
        edges = np.stack([lengths * c // chunks for c in numbers], 1).reshape(-1, 2)
        return _nonempty(np.repeat(np.arange(lengths.size), 2), edges[:, 0], edges[:, 1])

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
        # 32-bit arithmetic takes half of the time.
        longest = int(lengths.max(initial=0))
        small = longest < 2**28 and longest * chunks < 2**31
        lengths = lengths.astype(np.int32 if small else np.int64)
        return lengths[:, None] * np.arange(chunks + 1, dtype=lengths.dtype) // chunks

    def counts(self, cu_seqlens: Ints) -> Counts:
        # A document of L = a·2P + b tokens has a tokens in each chunk, and one more in the chunks
        # in which a document of b tokens has one, so documents with the same b are counted
        # together. Documents of fewer than 2P tokens, the short ones, have empty chunks.
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
            # Chunk c has a token if the next edge passes a multiple of 2P. Its mirror image has one
            # if the edge starts at a multiple, or passes one.
            leaves, passes = remainder == 0, remainder + b >= chunks
            both = passes.astype(np.float64) + (leaves | (remainder + b > chunks))
            some = (leaves | passes).astype(np.float64)
            found.append(np.concatenate([weights @ both.T, weights[1:] @ some.T]))
        of_all, of_short, runs = np.concatenate(found, axis=1).astype(np.int64)
        longs = int(is_long.sum())
        tokens = of_all + 2 * int((lengths // chunks).sum())
        spans = of_short + 2 * longs
        spans[-1] -= longs  # its chunks touch
        # The chunks of a short document on both sides of its middle may touch.
        left, right = (self._owner(short, short // 2 + side) for side in (-1, 0))
        np.subtract.at(spans, left[(left == right) & (short > 1)], 1)
        begun = np.bincount(self._owner(short, np.zeros_like(short)), minlength=self.ranks)
        begun[0] += longs
        return Counts(tokens, spans, runs + longs, spans - begun)

    def _owner(self, lengths: Ints, positions: Ints) -> Ints:
        chunk = _chunk(lengths, positions, 2 * self.ranks)
        return np.minimum(chunk, 2 * self.ranks - 1 - chunk)


@dataclass(frozen=True)
class Striped(CountedCut):
    """Each document has stripes of `stripe` tokens; rank s mod P holds stripe s."""

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
        spans = self._dealt(stripes) if self.ranks > 1 else runs  # one rank's stripes all touch
        begun = np.where(np.arange(self.ranks) == 0, runs, 0)
        return Counts(tokens, spans, runs, spans - begun)

    def _dealt(self, numbers: Ints) -> Ints:
        """Return how many items each rank gets if each of `numbers` is dealt from rank 0 on."""
        return int((numbers // self.ranks).sum()) + self._above(numbers % self.ranks)

    def _above(self, numbers: Ints) -> Ints:
        """Return how many of the numbers are larger than each rank."""
        return numbers.size - np.cumsum(np.bincount(numbers, minlength=self.ranks))[: self.ranks]


@dataclass(frozen=True, eq=False)
class Spans(TableCut):
    """Rank c holds spans edges[c] … edges[c+1] − 1 of a table. Spans that touch are joined."""

    edges: Ints
    documents: Ints
    starts: Ints
    stops: Ints
    most_spans: ClassVar[int | None] = None

    @classmethod
    def of(cls, ranks: int, owner: Ints, documents: Ints, starts: Ints, stops: Ints) -> Spans:
        """Return the cut in which rank `owner[i]` holds span i; empty spans are dropped."""
        kept = np.flatnonzero(stops > starts)
        kept = kept[np.lexsort((starts[kept], documents[kept], owner[kept]))]
        owner, columns = owner[kept], (documents[kept], starts[kept], stops[kept])
        columns, first = joined(columns, owner)
        return cls(np.searchsorted(owner[first], np.arange(ranks + 1)), *columns)

    @property
    def ranks(self) -> int:
        return self.edges.size - 1

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        held = slice(self.edges[rank], self.edges[rank + 1])
        return self.documents[held], self.starts[held], self.stops[held]

    def most_spans_of(self, lengths: Ints) -> Ints:
        return np.minimum(lengths, self.starts.size)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        keys = sort_keys(self.documents, self.starts)
        order = np.argsort(keys)
        keys = keys[order]
        owners = np.repeat(np.arange(self.ranks), np.diff(self.edges))[order]
        spans_starts, spans_stops = self.starts[order], self.stops[order]

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            # Spans cover every document: the last span that begins at or before a position has it.
            edges = sort_keys(documents, starts), sort_keys(documents, stops - 1)
            first, last = (np.searchsorted(keys, x, side="right") - 1 for x in edges)
            index, spans = enumerated(first, last)
            return HeldSpans(index, owners[spans], spans_starts[spans], spans_stops[spans])

        return lookup

    def table(self, cu_seqlens: Ints) -> tuple[Ints, Columns]:
        return self.edges, (self.documents, self.starts, self.stops)


@dataclass(frozen=True)
class Merged:
    """Another cut with each `size` consecutive ranks merged into one that has all their tokens."""

    members: Cut
    size: int
    most_spans: ClassVar[int | None] = None

    @property
    def ranks(self) -> int:
        return -(-self.members.ranks // self.size)

    @property
    def alike(self) -> bool:
        return self.members.alike

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        ranks = range(rank * self.size, min((rank + 1) * self.size, self.members.ranks))
        return merged([self.members.columns(cu_seqlens, member) for member in ranks])

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        tokens = self.members.token_counts(cu_seqlens)
        return np.add.reduceat(tokens, np.arange(0, tokens.size, self.size))

    def most_spans_of(self, lengths: Ints) -> Ints:
        return self.members.most_spans_of(lengths)

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        members = self.members.holders(cu_seqlens)

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            spans = members(documents, starts, stops)
            return spans._replace(owners=spans.owners // self.size)

        return lookup

    def mirrored_edges(self, lengths: Ints) -> Ints | None:
        edges, ranks = self.members.mirrored_edges(lengths), self.members.ranks
        if edges is None:
            return None
        low = np.minimum(np.arange(self.ranks + 1) * self.size, ranks)
        return edges[:, np.r_[low[:-1], 2 * ranks - low[::-1]]]


def merged(parts: Sequence[Columns]) -> Columns:
    """Return the spans of several ranks, by document, then position."""
    documents, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(sort_keys(documents, starts))
    return documents[order], starts[order], stops[order]


def joined(columns: Columns, ranks: Ints | None = None) -> tuple[Columns, Ints]:
    """Join a rank's spans that touch; return them, and each one's first index.

    Spans of several `ranks` follow one another.
    """
    documents, starts, stops = columns
    apart = np.ones(documents.size, bool)
    apart[1:] = (documents[1:] != documents[:-1]) | (starts[1:] != stops[:-1])
    if ranks is not None:
        apart[1:] |= ranks[1:] != ranks[:-1]
    first = np.flatnonzero(apart)
    last = np.r_[first[1:], documents.size][: first.size] - 1
    return (documents[first], starts[first], stops[last]), first


def _chunk(lengths: Ints, positions: Ints, chunks: int) -> Ints:
    """Return the chunk that holds a position if chunk c begins at ⌊c·length/chunks⌋."""
    return -(-(positions + 1) * chunks // lengths) - 1


def _nonempty(documents: Ints, starts: Ints, stops: Ints) -> Columns:
    kept = stops > starts
    return documents[kept], starts[kept], stops[kept]
