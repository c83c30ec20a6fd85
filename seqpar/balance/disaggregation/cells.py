"""Cells: the attention that each rank computes for its queries, before any work moves.

A cell is a contiguous span of a document's query rows on one rank, with all keys to which these
rows can attend. Cells are disjoint. All cells together contain every visible (query, key) pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import POSITION_BITS, sort_keys
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats, Tasks
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.tasks import Parts, TaskRectangles


def seconds_of(cells: Parts, costs: Costs | None) -> Floats:
    """Return (n,): the predicted seconds of the attention of each cell. If `costs` is None, return
    the number of visible (query, key) pairs of each cell.
    """
    pairs = cells.areas().astype(np.float64)
    if costs is None:
        return pairs
    rows, keys = (cells.q_stops - cells.q_starts), (cells.k_stops - cells.k_starts)
    # 1 if the window of at least one row of the cell excludes keys.
    windowed = np.where(cells.lows > cells.k_starts - cells.q_stops, 1.0, 0.0)
    calls = Tasks.of(rows, keys, pairs, np.where(pairs > 0, windowed, 0.0))
    grid, heads = costs.cluster.device.attention, (costs.model.heads, costs.model.head_dim)
    return grid.work(calls, *heads) + grid.work(calls, *heads, backward=True)


def cells_of(queries: Geometry, keys: Geometry, mask: Mask) -> Parts:
    """Divide the attention that each rank computes for its queries into cells. A cell is a span of
    query rows of one document on one rank, with the keys to which these rows can attend.

    If the mask has prefixes, to which all queries of a document attend, the keys of a prefix form
    separate cells.
    """
    servers, documents, starts, stops = queries.all_spans()
    first, length = np.zeros_like(documents), keys.lengths[documents]
    at_home = TaskRectangles(documents, starts, stops, first, length, servers)
    return Parts.of(at_home, queries, keys, mask)


Intervals = Sequence[tuple[int, int]]


class Unions:
    """Ranges of positions for each pair of a server and a document. Overlapping ranges of the same
    pair are merged.
    """

    def __init__(self, servers: Ints, documents: Ints, starts: Ints, stops: Ints) -> None:
        kept = np.flatnonzero(stops > starts)
        servers, documents, starts, stops = (x[kept] for x in (servers, documents, starts, stops))
        self._groups, number = np.unique(sort_keys(servers, documents), return_inverse=True)
        self.servers = self._groups >> POSITION_BITS
        self.documents = self._groups & (2**POSITION_BITS - 1)
        begins, ends = sort_keys(number, starts), sort_keys(number, stops)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        apart = begins[1:] > ends[:-1]  # always true between two pairs of server and document
        first, last = np.r_[True, apart][: begins.size], np.r_[apart, True][: begins.size]
        positions = 2**POSITION_BITS - 1
        self._starts, self._stops = begins[first] & positions, ends[last] & positions
        self._number = begins[first] >> POSITION_BITS
        self._edges = np.searchsorted(self._number, np.arange(self._groups.size + 1))
        self._found: dict[int, Intervals] = {}  # cache by (server, document)

    def of(self, server: int, document: int) -> Intervals:
        group = server << POSITION_BITS | document
        found = self._found.get(group)
        if found is None:
            i = int(self._groups.searchsorted(group))
            known = i < self._groups.size and self._groups[i] == group
            part = slice(self._edges[i], self._edges[i + 1]) if known else slice(0)
            found = list(zip(self._starts[part].tolist(), self._stops[part].tolist(), strict=True))
            self._found[group] = found
        return found

    def sizes(self, servers: int) -> Ints:
        """Return (servers,): the number of positions of each server, summed over all documents."""
        lengths = self._stops - self._starts
        return np.bincount(self.servers[self._number], lengths, servers).astype(np.int64)


def union(ranges: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of ranges, as ascending ranges with gaps between them."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def without(ranges: Intervals, others: Intervals) -> Intervals:
    """Return the positions of `ranges` that are in none of `others`, as ranges.

    The ranges of each argument must be ascending and must not touch each other.
    """
    found = []
    for start, stop in ranges:
        for first, last in others:
            if first < stop and last > start:
                if first > start:
                    found.append((start, first))
                start = max(start, last)
        if start < stop:
            found.append((start, stop))
    return found


def covered(ranges: Intervals, start: float, stop: float) -> float:
    """Count the positions start … stop − 1 that are in one of the ranges. The ranges must not touch
    each other.
    """
    total = 0.0
    for a, b in ranges:
        if a < stop and b > start:
            total += (b if b < stop else stop) - (a if a > start else start)
    return total


class KeyPlacement:
    """The keys that each server holds, and the keys that each server receives, before any work is
    moved between servers.

    `counts` (documents,) is the number of servers that have keys of each document.
    """

    def __init__(self, cells: Parts, spans: Sequence[Ints]) -> None:
        seen = cells.servers, cells.documents, cells.k_starts, cells.k_stops
        both = (np.concatenate(pair) for pair in zip(seen, spans, strict=True))
        self._own, self._all = Unions(*spans), Unions(*both)
        self._by_document = np.argsort(self._all.documents, kind="stable")
        documents = self._all.documents[self._by_document]
        self._edges = np.searchsorted(documents, np.arange(documents.max(initial=-1) + 2))
        self.counts: list[int] = np.diff(self._edges).tolist()

    def received(self, servers: int) -> Ints:
        """Return (servers,): the number of keys that each server receives, before any work is moved
        between servers.
        """
        return self._all.sizes(servers) - self._own.sizes(servers)

    def foreign(self, server: int, document: int) -> Intervals:
        return without(self._all.of(server, document), self._own.of(server, document))

    def of(self, server: int, document: int) -> Intervals:
        return self._all.of(server, document)

    def servers(self, document: int) -> list[int]:
        part = self._by_document[self._edges[document] : self._edges[document + 1]]
        return self._all.servers[part].tolist()
