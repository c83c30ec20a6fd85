"""Ranges of a packed batch that servers need for their tasks, and the stages that need them.

Positions here count from the start of the packed batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints, RowIndex
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.tasks.parts import Parts, cut_ranges


class Segments(NamedTuple):
    """Ranges of positions, sorted by server, then position. The ranges of a server are disjoint."""

    servers: Ints  # (n,) the server that needs the range
    starts: Ints  # (n,) positions
    stops: Ints
    owns: Ints  # (n,) −1, or when own queries need the range: the number of stages if not `staged`
    firsts: Ints  # (n,) the first stage in which queries of others (or `staged`, any) need it
    lasts: Ints  # (n,) the last such stage; without any, firsts has their number and lasts −1

    @classmethod
    def covering(
        cls, servers: Ints, starts: Ints, stops: Ints, stages: Ints, count: int, tokens: int
    ) -> Segments:
        """Return the segments that some ranges cover.

        A range is needed in one of `count` stages, or by its server's own queries if that is −1.
        """
        begins, ends = servers * tokens + starts, servers * tokens + stops
        edges = np.sort(np.r_[begins, ends])
        edges = edges[np.r_[True, edges[1:] != edges[:-1]][: edges.size]]
        depth = np.zeros((1 + count, edges.size), np.int64)
        np.add.at(depth, (1 + stages, np.searchsorted(edges, begins)), 1)
        np.add.at(depth, (1 + stages, np.searchsorted(edges, ends)), -1)
        covered = depth.cumsum(1)[:, :-1] > 0
        chosen = covered.any(0)
        begins, ends, covered = edges[:-1][chosen], edges[1:][chosen], covered[:, chosen]
        own, covered = covered[0], covered[1:]
        some = covered.any(0)
        labels = (
            begins // max(tokens, 1),
            np.where(own, count, -1),
            np.where(some, covered.argmax(0), count),
            np.where(some, count - 1 - covered[::-1].argmax(0), -1),
        )
        apart = np.ones(begins.size, bool)
        apart[1:] = begins[1:] != ends[:-1]
        for label in labels:
            apart[1:] |= label[1:] != label[:-1]
        first = np.flatnonzero(apart)
        last = np.r_[first[1:], begins.size][: first.size] - 1
        owners, *needed = (label[first] for label in labels)
        start = owners * tokens
        return cls(owners, begins[first] - start, ends[last] - start, *needed)

    @classmethod
    def of_queries(cls, parts: Parts, queries: Geometry, stages: Ints, count: int) -> Segments:
        """Return the queries of parts. Each part has a stage."""
        first = queries.cu_seqlens[parts.documents]
        ranges = first + parts.q_starts, first + parts.q_stops
        return cls.covering(parts.servers, *ranges, stages, count, queries.tokens)

    @classmethod
    def of_keys(cls, parts: Parts, keys: Geometry, stages: Ints, count: int) -> Segments:
        """Return the keys of parts. Each part has a stage, or −1 for the server's own queries."""
        first = keys.cu_seqlens[parts.documents]
        ranges = first + parts.k_starts, first + parts.k_stops
        return cls.covering(parts.servers, *ranges, stages, count, keys.tokens)

    def coming(self, geometry: Geometry) -> Ints:
        """Return the number of rows of each segment that its server does not hold."""
        coming = self.stops - self.starts
        for server in np.flatnonzero(np.bincount(self.servers)).tolist():
            own = self._slice(server)
            start, stop = self.of(server).rows(geometry, server)
            coming[own] -= stop - start
        return coming

    def stage_edges(self, coming: Ints, count: int, geometry: Geometry) -> Ints:
        """Return (servers, count + 1): the positions that divide a server's stages.

        The same number of rows is `coming` in each stage, except for half of that in the first,
        which has less work to hide under. They are assumed to be spread evenly within a segment.
        """
        edges = np.zeros((geometry.ranks, count + 1), np.int64)
        edges[:, 1:] = geometry.tokens
        for server in np.flatnonzero(np.bincount(self.servers)).tolist() if count > 1 else ():
            own = self._slice(server)
            reached, first = np.r_[0, np.cumsum(coming[own])], own.start
            wanted = _edges(reached[-1:], count)[0, 1:-1]
            at = np.maximum(np.searchsorted(reached, wanted) - 1, 0)
            length = (self.stops - self.starts)[first + at]
            inside = length * (wanted - reached[at]) // np.maximum(coming[first + at], 1)
            edges[server, 1:-1] = self.starts[first + at] + inside
        return edges

    def take(self, chosen: RowIndex) -> Segments:
        return Segments(*(column[chosen] for column in self))

    def of(self, server: int) -> Segments:
        own = self._slice(server)
        return Segments(*(column[own] for column in self))

    def staged(self, count: int) -> Segments:
        """Assign stages to one rank's rows, also to rows that servers' own queries need.

        Each server uses the same number of the latter in every stage, except for half of that in
        the first. Keys then arrive early, gradients return early, and the queries of other ranks
        wait for only a part of the server's own work.
        """
        ready, some = self.take(self.owns < 0), self.take(self.owns >= 0)
        columns = np.stack([some.servers, some.firsts, some.lasts])
        alike = np.unique(columns, axis=1, return_inverse=True)[1].ravel()
        order, lengths = np.argsort(alike, kind="stable"), some.stops - some.starts
        some, alike, lengths = some.take(order), alike[order], lengths[order]
        before = np.cumsum(lengths) - lengths
        before -= before[np.searchsorted(alike, alike)]
        edges = _edges(np.bincount(alike, lengths).astype(np.int64)[alike], count)
        index, first, last, stages = cut_ranges(before, before + lengths, edges)
        cut, starts = some.take(index), some.starts[index] + first - before[index]
        cut = cut._replace(
            starts=starts,
            stops=starts + last - first,
            firsts=np.minimum(cut.firsts, stages),
            lasts=np.maximum(cut.lasts, stages),
            owns=stages,
        )
        joined = Segments(*map(np.concatenate, zip(ready, cut, strict=True)))
        return joined.take(np.lexsort((joined.starts, joined.servers)))

    def _slice(self, server: int) -> slice:
        return slice(*np.searchsorted(self.servers, (server, server + 1)).tolist())

    def rows(self, geometry: Geometry, rank: int) -> tuple[Ints, Ints]:
        """Return the local rows [start, stop) of a rank in each segment."""
        holding = geometry.holdings[rank]
        firsts = geometry.cu_seqlens[holding.documents] + holding.starts
        return _rows_before(holding, firsts, self.starts), _rows_before(holding, firsts, self.stops)


def _edges(totals: Ints, count: int) -> Ints:
    """Return (n, count + 1) stage edges; the first stage hides less work and is half as long."""
    reached = np.r_[0, 2 * np.arange(1, count + 1) - 1]
    return totals[:, None] * reached // (2 * count - 1)


def _rows_before(holding: Holding, firsts: Ints, positions: Ints) -> Ints:
    """Count the local rows before each position; spans begin at the positions `firsts`."""
    if not firsts.size:
        return np.zeros_like(positions)
    found = np.searchsorted(firsts, positions, side="right") - 1
    span = np.maximum(found, 0)
    inside = np.minimum(positions - firsts[span], holding.stops[span] - holding.starts[span])
    return np.where(found < 0, 0, holding.offsets[span] + inside)
