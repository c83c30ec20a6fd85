"""Count the rows that a rank sends to each rank, and receives from each rank, under a mask.

A rank must know these numbers before it makes a call. This file counts the rows for one rank,
called the *asking* rank. Attention has two *sides*, queries and keys. The *reach* of some rows is
the set of positions on the other side that form a pair with at least one of these rows.

Only documents of the asking rank are processed, a few documents at a time, and only ranks in the
reach of the asking rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints
from seqpar.core.ranges import overlapping, sort_keys, union
from seqpar.layout.cuts.cut import HeldSpans
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.masks.mask import Mask

# This number limits the spans, on all ranks, of the documents that are processed at a time.
_BLOCK_SPANS = 2**17
_BLOCK_DOCUMENTS = 2**14
# This number limits the edges of mirrored chunks that are processed at a time. They should fit into
# a core's cache.
_BLOCK_EDGES = 2**16
# With mirrored chunks, the largest number of spans of a document on the asking rank.
_MAX_MIRRORED_SPANS = 2


class Intervals(NamedTuple):
    """Intervals of positions, as arrays (n,). The queries or keys at these positions form pairs
    with one span.
    """

    spans: Ints
    starts: Ints
    stops: Ints


@dataclass(frozen=True)
class Reach:
    """Finds the reach of spans: for spans of queries, the positions of keys that form pairs with
    the spans, and for spans of keys, the positions of queries.
    """

    lows: Ints  # (documents,): a row at position p reaches the positions p + low … p + high
    highs: Ints
    lengths: Ints  # (documents,): the lengths of documents on the other side
    mask: Mask  # used for its prefix and its ranges
    to_keys: bool  # whether the rows are queries, so that the other side is keys

    @classmethod
    def both(cls, queries: Geometry, keys: Geometry, mask: Mask) -> tuple[Reach, Reach]:
        shift = keys.lengths - queries.lengths
        lows, highs = shift - mask.left, shift + mask.right
        of_queries = cls(lows, highs, keys.lengths, mask, True)
        return of_queries, cls(-highs, -lows, queries.lengths, mask, False)

    def of(self, documents: Ints, starts: Ints, stops: Ints) -> Intervals:
        """Return the positions in the reach of some nonempty spans. The intervals may overlap."""
        if self.mask.ranges is not None:
            return self._in_ranges(documents, starts, stops)
        lengths = self.lengths[documents]
        begins = np.maximum(starts + self.lows[documents], 0)
        ends = np.minimum(stops + self.highs[documents], lengths)
        index = np.arange(documents.size)
        if self.mask.prefix is not None:
            prefix = np.array(self.mask.prefix, dtype=np.int64)[documents]
            # All queries attend to the keys of the prefix. All queries therefore reach the prefix,
            # and a span of keys that begins in the prefix reaches all queries.
            more = index if self.to_keys else np.flatnonzero(starts < prefix)
            reached = prefix if self.to_keys else lengths
            index = np.concatenate([index, more])
            begins = np.concatenate([begins, np.zeros_like(more)])
            ends = np.concatenate([ends, reached[more]])
        kept = np.flatnonzero(ends > begins)
        return Intervals(index[kept], begins[kept], ends[kept])

    def _in_ranges(self, documents: Ints, starts: Ints, stops: Ints) -> Intervals:
        assert self.mask.ranges is not None
        ranges = self.mask.ranges.columns
        own, other = ranges[1:3], ranges[3:5]
        lows, highs = ranges.lows, ranges.highs
        if not self.to_keys:
            own, other, lows, highs = other, own, -highs, -lows
        index, of_range = overlapping((documents, starts, stops), (ranges.documents, *own))
        first = np.maximum(starts[index], own[0][of_range])
        last = np.minimum(stops[index], own[1][of_range])
        begins = np.maximum(first + lows[of_range], other[0][of_range])
        ends = np.minimum(last + highs[of_range], other[1][of_range])
        kept = np.flatnonzero(ends > begins)
        return Intervals(index[kept], begins[kept], ends[kept])

    def union_of(self, rows: Holding) -> Holding:
        """Return the positions in the reach of any row of a rank, as spans of documents."""
        reached = self.of(*rows.columns)
        return _union(rows.documents[reached.spans], reached.starts, reached.stops)


class ReachedRows(NamedTuple):
    """The rows of one rank that form pairs with rows of other ranks.

    The arrays have one entry for each other rank, or one for each group of other ranks.
    """

    counts: Ints  # the number of rows
    firsts: Ints  # the first row; undefined if the count is 0
    behind: Ints  # the row after the last one; undefined if the count is 0

    @classmethod
    def none(cls, size: int) -> ReachedRows:
        zeros = np.zeros(size, np.int64)
        return cls(zeros, np.full(size, np.iinfo(np.int64).max), zeros.copy())

    @property
    def are_ranges(self) -> NDArray[np.bool_]:
        """Whether the rows for each rank or group are consecutive."""
        return (self.counts > 0) & (self.counts == self.behind - self.firsts)


class AttentionSide(NamedTuple):
    """The queries of all ranks or the keys of all ranks.

    For a rank with queries, the object contains the keys of all ranks. For a rank with keys, it
    contains the queries of all ranks.
    """

    others: Geometry  # the geometry of the other ranks' rows
    own_reach: Reach  # from the asking rank's rows to rows of other ranks
    their_reach: Reach  # from rows of other ranks to the asking rank's rows

    @classmethod
    def of_queries(cls, queries: Geometry, keys: Geometry, mask: Mask) -> AttentionSide:
        """Return the keys of all ranks, as the side to which the queries of one rank attend."""
        return cls(keys, *Reach.both(queries, keys, mask))

    @classmethod
    def of_keys(cls, queries: Geometry, keys: Geometry, mask: Mask) -> AttentionSide:
        """Return the queries of all ranks, as the side that attends to the keys of one rank."""
        return cls(queries, *reversed(Reach.both(queries, keys, mask)))

    def own_rows(self, own: Holding, groups: Ints | None = None) -> ReachedRows:
        """Return, for each rank, which of the rows in `own` form a (query, key) pair with a row of
        that rank.

        If `groups` (ranks,) assigns each rank to a group, the result has one entry for each group
        instead.
        """
        if groups is None and self._is_mirrored(own):
            return self._mirrored_own_rows(own)
        size = self.others.ranks if groups is None else int(groups.max(initial=-1)) + 1
        reached = ReachedRows.none(size)
        for documents, spans in self._spans_within(self.own_reach.union_of(own)):
            of_spans = documents[spans.numbers]
            group = spans.owners if groups is None else groups[spans.owners]
            index, starts, stops = self.their_reach.of(of_spans, spans.starts, spans.stops)
            runs = (spans.numbers * size + group)[index]
            order = np.argsort(sort_keys(runs, starts))
            index, starts, stops, runs = (x[order] for x in (index, starts, stops, runs))
            starts = _beyond_earlier(runs, starts, stops)
            firsts, behind = (own.rows_before(of_spans[index], x) for x in (starts, stops))
            kept = np.flatnonzero(behind > firsts)
            firsts, behind, group = firsts[kept], behind[kept], group[index[kept]]
            reached.counts[:] += np.bincount(group, behind - firsts, size).astype(np.int64)
            np.minimum.at(reached.firsts, group, firsts)
            np.maximum.at(reached.behind, group, behind)
        return reached

    def their_rows(self, own: Holding) -> Ints:
        """Return how many rows of each rank form pairs with rows of the asking rank, (ranks,)."""
        reached = self.own_reach.union_of(own)
        has_mirrored_chunks = self.others.cut.mirrored_edges(reached.offsets[:0]) is not None
        if has_mirrored_chunks and (np.diff(reached.documents) > 0).all():
            return self._mirrored_their_rows(reached)
        counts = np.zeros(self.others.ranks, np.int64)
        for documents, (index, owners, starts, stops) in self._spans_within(reached):
            before, behind = (reached.rows_before(documents[index], x) for x in (starts, stops))
            counts += np.bincount(owners, behind - before, counts.size).astype(np.int64)
        return counts

    def own_ranges(self, own: Holding, peers: Sequence[Holding]) -> Ints:
        """Return the asking rank's rows that form pairs with rows of at least one peer, as ranges
        (m, 2).

        There is at least one row between two ranges.
        """
        parts = []
        for peer in peers:
            reached = self.their_reach.of(*peer.columns)
            documents = peer.documents[reached.spans]
            parts.append([own.rows_before(documents, x) for x in reached[1:]])
        starts, stops = np.concatenate(parts, axis=1)
        kept = np.flatnonzero(stops > starts)
        order = kept[np.argsort(starts[kept])]
        return union(starts[order], stops[order])

    def _spans_within(self, reached: Holding) -> Iterator[tuple[Ints, HeldSpans]]:
        """Yield a few documents at a time, with the spans of all ranks that may contain reached
        positions.
        """
        documents, first, behind = reached.runs
        starts, stops = reached.starts[first], reached.stops[behind - 1]
        lookup = self.others.holders
        limits = self.others.cut.most_spans_of(self.others.lengths[documents])
        for block in _blocks(limits):
            yield documents[block], lookup(documents[block], starts[block], stops[block])

    def _is_mirrored(self, own: Holding) -> bool:
        mask = self.their_reach.mask
        if mask.ranges is not None or mask.prefix is not None or mask.left < 2**40:
            return False
        if self.others.cut.mirrored_edges(own.offsets[:0]) is None:
            return False
        _, first, behind = own.runs
        return int((behind - first).max(initial=0)) <= _MAX_MIRRORED_SPANS

    def _mirrored_own_rows(self, own: Holding) -> ReachedRows:
        """Return the result of `own_rows` for a layout such as zigzag and a mask without a left
        limit.

        In a zigzag layout, each rank holds two chunks of a document.
        """
        ranks, to_keys = self.others.ranks, self.their_reach.to_keys
        bounds = self.their_reach.highs if to_keys else self.their_reach.lows
        documents, first, behind = own.runs
        reached = ReachedRows.none(ranks)
        are_long = int(own.stops.max(initial=0)) >= 2**28
        for block, edges in self._mirrored(documents):
            # The dtype of edges is large enough for documents of the other side. Documents of the
            # asking rank may be longer.
            if are_long:
                edges = edges.astype(np.int64)
            far = 2**30 if edges.dtype == np.int32 else 2**50
            limits = _reached_by_mirrored(edges, far, to_keys)
            rows = np.zeros(limits.shape, edges.dtype)
            first_spans, behind_spans = first[block], behind[block]
            for number in range(_MAX_MIRRORED_SPANS):
                span = np.minimum(first_spans + number, behind_spans - 1)
                lengths = np.where(first_spans + number < behind_spans, 1, 0)
                lengths = (lengths * (own.stops[span] - own.starts[span])).astype(edges.dtype)
                begins = own.starts[span] - bounds[documents[block]]
                begins = np.clip(begins, -far // 2, far // 2).astype(edges.dtype)
                rows += np.minimum(np.maximum(limits - begins[:, None], 0), lengths[:, None])
            first_rows = own.offsets[first_spans][:, None]
            behind_rows = own.offsets[behind_spans][:, None]
            if to_keys:
                firsts, ends = first_rows, first_rows + rows
            else:
                rows = behind_rows - first_rows - rows
                firsts, ends = behind_rows - rows, behind_rows
            some = rows > 0
            reached.counts[:] += rows.sum(0, np.int64)
            firsts = np.where(some, firsts, reached.firsts)
            np.minimum(reached.firsts, firsts.min(0), out=reached.firsts)
            np.maximum(reached.behind, np.where(some, ends, 0).max(0), out=reached.behind)
        return reached

    def _mirrored_their_rows(self, reached: Holding) -> Ints:
        ranks = self.others.ranks
        below = np.zeros(2 * ranks + 1, np.int64)
        for block, edges in self._mirrored(reached.documents):
            positions = np.stack([reached.starts[block], reached.stops[block]])
            starts, stops = positions.astype(edges.dtype)[..., None]
            below += np.minimum(np.maximum(edges, starts), stops).sum(0, np.int64)
        chunks = np.diff(below)
        return chunks[:ranks] + chunks[ranks:][::-1]

    def _mirrored(self, documents: Ints) -> Iterator[tuple[slice, Ints]]:
        size = max(1, _BLOCK_EDGES // (2 * self.others.ranks + 1))
        lengths = self.others.lengths[documents]
        for first in range(0, documents.size, size):
            block = slice(first, first + size)
            edges = self.others.cut.mirrored_edges(lengths[block])
            assert edges is not None
            yield block, edges


def _reached_by_mirrored(edges: Ints, far: int, to_keys: bool) -> Ints:
    """Return the position that limits which tokens a rank's two chunks reach, (documents, ranks).

    The chunks reach a token if it forms a (query, key) pair with some token of the chunks. With
    `to_keys`, the chunks are queries, and the position is the end of the rank's last chunk. Without
    `to_keys`, they are keys, and the position is the start of the rank's first chunk. Without
    tokens of a document, it is −far for queries, and far for keys.
    """
    ranks = edges.shape[1] // 2
    low_starts, low_stops = edges[:, :ranks], edges[:, 1 : ranks + 1]
    high_starts, high_stops = edges[:, ranks : 2 * ranks][:, ::-1], edges[:, ranks + 1 :][:, ::-1]
    has_low, has_high = low_stops > low_starts, high_stops > high_starts
    if to_keys:
        limits = np.where(has_low, low_stops, edges.dtype.type(-far))
        np.copyto(limits, high_stops, where=has_high)
    else:
        limits = np.where(has_high, high_starts, edges.dtype.type(far))
        np.copyto(limits, low_starts, where=has_low)
    return limits


def _union(documents: Ints, starts: Ints, stops: Ints) -> Holding:
    order = np.argsort(sort_keys(documents, starts))
    documents, starts, stops = documents[order], starts[order], stops[order]
    starts = _beyond_earlier(documents, starts, stops)
    kept = np.flatnonzero(stops > starts)
    return Holding((documents[kept], starts[kept], stops[kept]))


def _beyond_earlier(runs: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return the starts of intervals, moved behind all earlier intervals of the same run, so that
    no position is in two intervals.

    Intervals are sorted by run, then by start.
    """
    reached = np.maximum.accumulate(sort_keys(runs, stops))
    earlier = np.r_[0, reached[:-1]][: reached.size] - sort_keys(runs, np.zeros_like(runs))
    return np.maximum(starts, earlier)


def _blocks(limits: Ints) -> Iterator[slice]:
    """Yield slices of consecutive documents whose `limits`, the largest numbers of spans, sum to at
    most `_BLOCK_SPANS`.

    A document whose limit is larger than `_BLOCK_SPANS` is alone in its slice.
    """
    ends, first = np.cumsum(limits), 0
    while first < limits.size:
        done = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, done + _BLOCK_SPANS, side="right"))
        stop = min(max(stop, first + 1), first + _BLOCK_DOCUMENTS)
        yield slice(first, stop)
        first = stop
