"""`Cut`, the interface of the rules that assign the tokens of a packed batch to ranks.

A *cut* is such a rule, for example zigzag. It consists of the number of ranks and a few options. A
*span* is a range of positions of one document that one rank holds. Most cuts do not store spans,
but compute the spans of one rank at a time, so that memory does not grow with the number of ranks.
Two cuts are in this file: `Spans`, which stores a list of spans, and `Merged`, which treats several
consecutive ranks of another cut as one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import enumerated, sort_keys

Columns = tuple[Ints, Ints, Ints]  # the documents, starts and stops of spans


class Counts(NamedTuple):
    """The numbers of tokens, spans and runs on each rank, as arrays (ranks,).

    A *span* is a range of positions of one document that one rank holds, and a *run* is all tokens
    of one document on one rank. `continued` is the number of spans that do not begin at the start
    of their document.
    """

    tokens: Ints
    spans: Ints
    runs: Ints
    continued: Ints


class HeldSpans(NamedTuple):
    """Spans, and the ranks that hold the spans, as arrays.

    A *span* is a range of positions of one document that one rank holds.

    Attributes:
        numbers: the document of each span, as an index into the documents that the caller has
            given.
        owners: the rank that holds each span.
        starts, stops: the positions of each span.
    """

    numbers: Ints
    owners: Ints
    starts: Ints
    stops: Ints

    def nonempty(self) -> HeldSpans:
        kept = np.flatnonzero(self.stops > self.starts)
        return HeldSpans(*(column[kept] for column in self))


# Takes the documents, starts and stops of nonempty ranges of positions, each (n,). Returns all
# spans that overlap these ranges, on all ranks. The result may contain further spans of the same
# documents.
HolderLookup = Callable[[Ints, Ints, Ints], HeldSpans]


class Cut(Protocol):
    """The interface of all cuts.

    Attributes:
        alike: whether documents of equal length are always cut in the same way.
    """

    @property
    def ranks(self) -> int: ...

    @property
    def alike(self) -> bool: ...

    @property
    def most_documents(self) -> int:
        """The number of documents to which every batch is padded, or 0 without padding."""

    @property
    def most_spans(self) -> int | None:
        """The largest number of spans of one document that a rank can hold, or None if there is no
        limit.
        """

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        """Return the nonempty spans that a rank holds, sorted by document, then by position."""

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        """Return the number of tokens on each rank, (ranks,)."""

    def most_spans_of(self, lengths: Ints) -> Ints:
        """Return for each document length the largest number of spans that such a document can
        have.
        """

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        """Return a function that finds the ranks that hold given positions of documents."""

    def mirrored_edges(self, lengths: Ints) -> Ints | None:
        """Return the edges of the chunks of documents, (documents, 2P + 1), or None.

        The result is None unless each document is cut into 2P chunks, and each rank c of P ranks
        holds the chunks c and 2P − 1 − c. Chunks may be empty.
        """


class CountedCut:
    """Defaults for a cut that has `counts` and does not mirror chunks."""

    alike: ClassVar[bool] = False
    most_documents = 0

    def counts(self, cu_seqlens: Ints) -> Counts:
        raise NotImplementedError

    def token_counts(self, cu_seqlens: Ints) -> Ints:
        return self.counts(cu_seqlens).tokens

    def mirrored_edges(self, lengths: Ints) -> Ints | None:
        return None


class TableCut(CountedCut):
    def table(self, cu_seqlens: Ints) -> tuple[Ints, Columns]:
        """Return the spans of all ranks, and the index of each rank's first span, (ranks + 1,).

        The last index is the number of spans.
        """
        raise NotImplementedError

    def counts(self, cu_seqlens: Ints) -> Counts:
        edges, (documents, starts, stops) = self.table(cu_seqlens)
        begins_run = np.r_[True, documents[1:] != documents[:-1]][: documents.size]
        begins_run[edges[edges < documents.size]] = True
        each = stops - starts, np.ones_like(starts), begins_run, starts > 0
        return Counts(*(np.diff(np.r_[0, np.cumsum(numbers)][edges]) for numbers in each))


@dataclass(frozen=True, eq=False)
class Spans(TableCut):
    """A cut that stores all spans. Rank c holds the spans edges[c] … edges[c + 1] − 1.

    Adjacent spans of one rank are joined.
    """

    edges: Ints
    documents: Ints
    starts: Ints
    stops: Ints
    most_spans: ClassVar[int | None] = None

    @classmethod
    def of(cls, ranks: int, owner: Ints, documents: Ints, starts: Ints, stops: Ints) -> Spans:
        """Return the cut in which rank `owner[i]` holds span i. Empty spans are left out."""
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
            # The spans cover each document completely. Each position therefore lies in the last
            # span that begins at or before it.
            edges = sort_keys(documents, starts), sort_keys(documents, stops - 1)
            first, last = (np.searchsorted(keys, x, side="right") - 1 for x in edges)
            index, spans = enumerated(first, last)
            return HeldSpans(index, owners[spans], spans_starts[spans], spans_stops[spans])

        return lookup

    def table(self, cu_seqlens: Ints) -> tuple[Ints, Columns]:
        return self.edges, (self.documents, self.starts, self.stops)


@dataclass(frozen=True)
class Merged:
    """A cut that treats each `size` consecutive ranks of another cut as one rank."""

    members: Cut
    size: int
    most_spans: ClassVar[int | None] = None

    @property
    def ranks(self) -> int:
        return -(-self.members.ranks // self.size)

    @property
    def alike(self) -> bool:
        return self.members.alike

    @property
    def most_documents(self) -> int:
        return self.members.most_documents

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
    """Return the spans of several ranks as one table, sorted by document, then by position."""
    documents, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(sort_keys(documents, starts))
    return documents[order], starts[order], stops[order]


def joined(columns: Columns, ranks: Ints | None = None) -> tuple[Columns, Ints]:
    """Join adjacent spans of one rank. A *span* is a range of positions of one document.

    Returns the joined spans, and for each joined span the index of its first span in `columns`. If
    `columns` has spans of several ranks, they must be sorted by rank, and `ranks` has the rank of
    each span.
    """
    documents, starts, stops = columns
    apart = np.ones(documents.size, bool)
    apart[1:] = (documents[1:] != documents[:-1]) | (starts[1:] != stops[:-1])
    if ranks is not None:
        apart[1:] |= ranks[1:] != ranks[:-1]
    first = np.flatnonzero(apart)
    last = np.r_[first[1:], documents.size][: first.size] - 1
    return (documents[first], starts[first], stops[last]), first


def nonempty(documents: Ints, starts: Ints, stops: Ints) -> Columns:
    kept = stops > starts
    return documents[kept], starts[kept], stops[kept]
