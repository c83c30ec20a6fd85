"""Ranges of a packed batch that servers need for their tasks, and when.

Positions here count from the start of the packed batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.tasks.parts import Parts, cut_ranges


class Segments(NamedTuple):
    """Ranges of positions, ascending by server, then position; those of a server are disjoint.

    Attributes:
        servers: (n,) who needs them.
        starts, stops: (n,) positions.
        owns: (n,) −1 unless the server's own queries need them; then the number of stages, and of
            what is `staged` the stage in which they do.
        firsts, lasts: (n,) the first and the last stage that needs them for guests; if none does,
            the number of stages and −1. Of what is `staged`: that needs them at all.
    """

    servers: Ints
    starts: Ints
    stops: Ints
    owns: Ints
    firsts: Ints
    lasts: Ints

    @classmethod
    def covering(
        cls, servers: Ints, starts: Ints, stops: Ints, stages: Ints, count: int, tokens: int
    ) -> Segments:
        """Return all that some ranges cover, each of which a stage needs, or for −1 its owner.

        There are `count` stages, and `tokens` positions.
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
        """Return the queries of parts, each of which is in a stage."""
        first = queries.cu_seqlens[parts.documents]
        ranges = first + parts.q_starts, first + parts.q_stops
        return cls.covering(parts.servers, *ranges, stages, count, queries.tokens)

    @classmethod
    def of_keys(cls, parts: Parts, keys: Geometry, stages: Ints, count: int) -> Segments:
        """Return the keys of parts, each of which is in a stage, or of own queries for −1."""
        first = keys.cu_seqlens[parts.documents]
        ranges = first + parts.k_starts, first + parts.k_stops
        return cls.covering(parts.servers, *ranges, stages, count, keys.tokens)

    def coming(self, geometry: Geometry) -> Ints:
        """Return how many rows of each segment its server does not hold."""
        coming = self.stops - self.starts
        for server in np.flatnonzero(np.bincount(self.servers)).tolist():
            own = self._slice(server)
            start, stop = self.of(server).rows(geometry, server)
            coming[own] -= stop - start
        return coming

    def stage_edges(self, coming: Ints, count: int, geometry: Geometry) -> Ints:
        """Return (servers, count + 1): between which positions a server's stages lie.

        As many rows are `coming` to a server in each stage, but half as many in the first, which
        has less to hide under. Within a segment they are taken to lie evenly.
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

    def take(self, chosen: NDArray[Any]) -> Segments:
        """Return those that an index, or a mask, chooses."""
        return Segments(*(column[chosen] for column in self))

    def of(self, server: int) -> Segments:
        """Return those of one server."""
        own = self._slice(server)
        return Segments(*(column[own] for column in self))

    def staged(self, count: int) -> Segments:
        """Return ranges of one rank's rows in stages, also of what servers' own queries need.

        Of that each server uses as much in every stage, but half as much in the first. So keys come
        early, gradients return early, and guests of a stage wait for a part of its own work only.
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
        """Return where those of a server are."""
        return slice(*np.searchsorted(self.servers, (server, server + 1)).tolist())

    def rows(self, geometry: Geometry, rank: int) -> tuple[Ints, Ints]:
        """Return which local rows [start, stop) of a rank are in each segment."""
        holding = geometry.holdings[rank]
        firsts = geometry.cu_seqlens[holding.documents] + holding.starts
        return _rows_before(holding, firsts, self.starts), _rows_before(holding, firsts, self.stops)


def _edges(totals: Ints, count: int) -> Ints:
    """Return (n, count + 1): where amounts are cut into stages, of which the first is half as long.

    It has less to hide under.
    """
    reached = np.r_[0, 2 * np.arange(1, count + 1) - 1]
    return totals[:, None] * reached // (2 * count - 1)


def _rows_before(holding: Holding, firsts: Ints, positions: Ints) -> Ints:
    """Count the local rows before each position; `firsts` are those at which spans begin."""
    if not firsts.size:
        return np.zeros_like(positions)
    found = np.searchsorted(firsts, positions, side="right") - 1
    span = np.maximum(found, 0)
    inside = np.minimum(positions - firsts[span], holding.stops[span] - holding.starts[span])
    return np.where(found < 0, 0, holding.offsets[span] + inside)
