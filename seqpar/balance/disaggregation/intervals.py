"""Unions of ranges of positions, for many (server, document) pairs at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import POSITION_BITS, sort_keys

Intervals = Sequence[tuple[int, int]]


class Unions:
    """For each (server, document) the union of ranges of the document's positions."""

    def __init__(self, servers: Ints, documents: Ints, starts: Ints, stops: Ints) -> None:
        kept = np.flatnonzero(stops > starts)
        servers, documents, starts, stops = (x[kept] for x in (servers, documents, starts, stops))
        self._groups, number = np.unique(sort_keys(servers, documents), return_inverse=True)
        self.servers = self._groups >> POSITION_BITS
        self.documents = self._groups & (2**POSITION_BITS - 1)
        begins, ends = sort_keys(number, starts), sort_keys(number, stops)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        apart = begins[1:] > ends[:-1]  # always true between groups
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
        """Return (servers,) the number of positions of each server, over all documents."""
        lengths = self._stops - self._starts
        return np.bincount(self.servers[self._number], lengths, servers).astype(np.int64)


def union(ranges: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of ranges, as ascending ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def without(ranges: Intervals, others: Intervals) -> Intervals:
    """Return the parts of `ranges` that are in none of `others`. Both must ascend and not touch."""
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
    """Return how many positions from `start` to `stop` the ranges cover. They must not touch."""
    total = 0.0
    for a, b in ranges:
        if a < stop and b > start:
            total += (b if b < stop else stop) - (a if a > start else start)
    return total
