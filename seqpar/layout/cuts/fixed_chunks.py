"""A cut whose documents are chunks with a fixed number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up, enumerated
from seqpar.layout.cuts.cut import (
    Columns,
    CountedCut,
    Counts,
    Cut,
    HeldSpans,
    HolderLookup,
    joined,
)


def cut_into_fixed_chunks(cu_seqlens: Ints, size: int) -> Ints:
    """Return the cu_seqlens of chunks of `size` tokens. The last chunk of a document may be
    shorter.
    """
    count = _chunks(cu_seqlens, size)
    document = np.repeat(np.arange(count.size), count)
    return np.r_[cu_seqlens[document] + count_up(count) * size, cu_seqlens[-1]]


def _chunks(cu_seqlens: Ints, size: int) -> Ints:
    return np.maximum(-(-np.diff(cu_seqlens) // size), 1)


@dataclass(frozen=True, eq=False)
class FixedChunks(CountedCut):
    """A cut in which each chunk of a document counts as a document.

    Each rank holds the same tokens as in the cut from which this cut was made.
    """

    whole: Cut  # the other cut
    documents: Ints  # cu_seqlens of the documents of the other cut
    size: int

    @property
    def ranks(self) -> int:
        return self.whole.ranks

    @property
    def most_spans(self) -> int | None:
        return self.whole.most_spans

    def columns(self, cu_seqlens: Ints, rank: int) -> Columns:
        documents, starts, stops = self.whole.columns(self.documents, rank)
        span, chunk = enumerated(starts // self.size, (stops - 1) // self.size)
        begin = chunk * self.size
        first_chunks = self._first_chunks[documents[span]]
        starts, stops = np.maximum(starts[span] - begin, 0), stops[span] - begin
        return first_chunks + chunk, starts, np.minimum(stops, self.size)

    @property
    def _first_chunks(self) -> Ints:
        counts = _chunks(self.documents, self.size)
        return np.cumsum(counts) - counts

    def most_spans_of(self, lengths: Ints) -> Ints:
        return lengths

    def holders(self, cu_seqlens: Ints) -> HolderLookup:
        whole, first_chunks = self.whole.holders(self.documents), self._first_chunks

        def lookup(documents: Ints, starts: Ints, stops: Ints) -> HeldSpans:
            of_whole = np.searchsorted(first_chunks, documents, side="right") - 1
            begins = (documents - first_chunks[of_whole]) * self.size
            spans = whole(of_whole, begins + starts, begins + stops)
            begins, starts, stops = (x[spans.numbers] for x in (begins, starts, stops))
            starts = np.maximum(spans.starts - begins, starts)
            stops = np.minimum(spans.stops - begins, stops)
            return spans._replace(starts=starts, stops=stops).nonempty()

        return lookup

    def counts(self, cu_seqlens: Ints) -> Counts:
        rows = []
        for rank in range(self.ranks):
            (documents, starts, stops), _ = joined(self.columns(cu_seqlens, rank))
            runs = np.count_nonzero(np.diff(documents, prepend=-1))
            rows.append([(stops - starts).sum(), starts.size, runs, np.count_nonzero(starts)])
        return Counts(*np.array(rows, dtype=np.int64).T)
