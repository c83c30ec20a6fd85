"""Cells: the work of attention as its layout places it, before any of it moves.

A cell is what a rank has of a document in one piece, a span of query rows, with all keys that they
may see. Cells are disjoint, and together have every visible (query, key) pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.arguments import Ints
from seqpar.balance.intervals import Intervals, Unions, without
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.costs.grid import Tasks as Calls
from seqpar.layout.cuts import Contiguous, Spans
from seqpar.layout.geometry import Geometry
from seqpar.layout.mask import UNLIMITED, Mask

Spanned = tuple[Ints, Ints, Ints, Ints]


class Cells(NamedTuple):
    """Rectangles of query and key positions with the band that is visible in them, (n,) arrays.

    Attributes:
        documents: whose queries and keys.
        q_starts, q_stops: which queries.
        k_starts, k_stops: which keys.
        lows, highs: query i sees the key at j if low ≤ j − i ≤ high.
        servers: the rank that has the queries.
    """

    documents: Ints
    q_starts: Ints
    q_stops: Ints
    k_starts: Ints
    k_stops: Ints
    lows: Ints
    highs: Ints
    servers: Ints

    @property
    def pairs(self) -> Ints:
        """(n,) how many (query, key) pairs of each see each other."""
        return self._below(self.highs) - self._below(self.lows - 1)

    def _below(self, bounds: Ints) -> Ints:
        """Count each cell's pairs with j − i ≤ bound.

        Query i sees clip(i + c, 0, w) of a cell's w keys; these sums are in closed form.
        """
        width = self.k_stops - self.k_starts
        c = np.clip(bounds + 1 - self.k_starts, -self.q_stops, width - self.q_starts)

        def before(x: Ints) -> Ints:
            growing = np.clip(x, 0, width)
            return growing * (growing - 1) // 2 + width * np.maximum(x - width, 0)

        return before(self.q_stops + c) - before(self.q_starts + c)

    def seconds(self, costs: Costs | None) -> Floats:
        """(n,) predicted seconds of each, forward and backward; without costs, its pairs."""
        pairs = self.pairs.astype(np.float64)
        if costs is None:
            return pairs
        rows, keys = (self.q_stops - self.q_starts), (self.k_stops - self.k_starts)
        # Whether any row's window leaves keys out; near the start of a document not all rows' does.
        windowed = np.where(self.lows > self.k_starts - self.q_stops, 1.0, 0.0)
        calls = Calls.of(rows, keys, pairs, np.where(pairs > 0, windowed, 0.0))
        grid, heads = costs.cluster.device.attention, (costs.model.heads, costs.model.head_dim)
        return grid.work(calls, *heads) + grid.work(calls, *heads, backward=True)

    def take(self, index: Ints) -> Cells:
        """Return some of the cells."""
        return Cells(*(column[index] for column in self))


def spans_of(geometry: Geometry) -> Spanned:
    """Return all spans of a geometry as (n,) ranks, documents, starts and stops."""
    cut, cu = geometry.cut, geometry.cu_seqlens
    columns: tuple[Ints, ...]
    if isinstance(cut, Spans):
        edges, columns = cut.edges, (cut.documents, cut.starts, cut.stops)
    elif isinstance(cut, Contiguous):
        edges, columns = cut.table(cu)
    else:
        parts = [cut.columns(cu, rank) for rank in range(cut.ranks)]
        edges = np.r_[0, np.cumsum([part[0].size for part in parts])]
        columns = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    documents, starts, stops = columns
    return np.repeat(np.arange(cut.ranks), np.diff(edges)), documents, starts, stops


def cells_of(queries: Geometry, keys: Geometry, mask: Mask) -> Cells:
    """Return the cells of a mask, where the layout of the queries has them.

    Keys that a prefix shows to all queries are in cells of their own, without a band.
    """
    servers, documents, starts, stops = spans_of(queries)
    length = keys.lengths[documents]
    shift = length - queries.lengths[documents]  # aligns the ends of each document
    lows, highs = shift - mask.left, shift + mask.right
    first = np.zeros_like(length)
    parts = []
    if mask.prefix is not None:
        first = np.array(mask.prefix, np.int64)[documents]
        anywhere = np.full_like(first, UNLIMITED)
        of_prefix = documents, starts, stops, np.zeros_like(first), first, -anywhere, anywhere
        parts.append(Cells(*of_prefix, servers))
    k_starts = np.clip(starts + lows, first, length)
    k_stops = np.clip(stops + highs, k_starts, length)
    seeing = np.maximum(starts, k_starts - highs), np.minimum(stops, k_stops - lows)
    parts.append(Cells(documents, *seeing, k_starts, k_stops, lows, highs, servers))
    cells = Cells(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return cells.take(np.flatnonzero((cells.q_stops > cells.q_starts) & (cells.pairs > 0)))


class Keys:
    """Which keys servers have, and which travel to them if no work moves.

    Attributes:
        counts: (documents,) how many servers have or receive keys of each.
    """

    def __init__(self, cells: Cells, spans: Spanned) -> None:
        seen = cells.servers, cells.documents, cells.k_starts, cells.k_stops
        both = (np.concatenate(pair) for pair in zip(seen, spans, strict=True))
        self._own, self._all = Unions(*spans), Unions(*both)
        self._by_document = np.argsort(self._all.documents, kind="stable")
        documents = self._all.documents[self._by_document]
        self._edges = np.searchsorted(documents, np.arange(documents.max(initial=-1) + 2))
        self.counts: list[int] = np.diff(self._edges).tolist()

    def received(self, servers: int) -> Ints:
        """Return (servers,) how many keys travel to each if no work moves."""
        return self._all.sizes(servers) - self._own.sizes(servers)

    def foreign(self, server: int, document: int) -> Intervals:
        """Return the keys of a document that travel to a server."""
        return without(self._all.of(server, document), self._own.of(server, document))

    def of(self, server: int, document: int) -> Intervals:
        """Return the keys of a document that a server has or receives."""
        return self._all.of(server, document)

    def servers(self, document: int) -> list[int]:
        """Return the servers that have or receive keys of a document."""
        part = self._by_document[self._edges[document] : self._edges[document + 1]]
        found: list[int] = self._all.servers[part].tolist()
        return found
