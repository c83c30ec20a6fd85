"""The rows that travel if ranks form a mesh and each one computes a tile of queries and keys.

A rank's tile is the queries of all ranks of its row over the keys of all ranks of its column. Every
pair of ranks, one with queries and one with keys, is therefore in exactly one tile: it belongs to
the rank where the row of the first crosses the column of the second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import union
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.blocks import Blocks
from seqpar.layout.masks.mask import Mask, Slices, local_slices
from seqpar.layout.masks.split_work import halves
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.plan import KeyPlan, KeyStep, with_reuse
from seqpar.softmax.queries.exchange import QueryHop
from seqpar.softmax.wire.row_messages import Rows


class Tiles:
    """The tiles of all ranks of a call, on a mesh whose ranks are counted along its rows.

    It caches all slices that it makes, which takes much memory: use one object and drop it.
    """

    def __init__(self, queries: Geometry, keys: Geometry, mask: Mask, columns: int) -> None:
        self._geometry, self._columns = (queries, keys, mask), columns
        self._local: dict[tuple[int, int], Slices] = {}
        self._query_rows: dict[tuple[int, int], Ints] = {}
        self._key_rows: dict[tuple[int, int], Ints] = {}

    def row(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's row, in the order in which it sends them queries."""
        first = rank - rank % self._columns
        return [first + (rank + step) % self._columns for step in range(1, self._columns)]

    def column(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's column, in the order in which it sends them keys."""
        ranks = self._geometry[0].ranks
        return [other % ranks for other in range(rank + self._columns, rank + ranks, self._columns)]

    def query_rows(self, rank: int, receiver: int) -> Ints:
        """Return (m, 2): ranges of a rank's queries that travel to another rank of its row.

        These are the queries that attend to a key of the receiver's column.
        """
        if (rows := self._query_rows.get((rank, receiver))) is None:
            parts = [self._slices(rank, peer).seeing for peer in [receiver, *self.column(receiver)]]
            rows = self._query_rows[rank, receiver] = _union(parts)
        return rows

    def key_rows(self, rank: int, receiver: int) -> Ints:
        """Return (m, 2): ranges of a rank's keys that travel to another rank of its column.

        These are the keys that queries of the receiver's row attend to.
        """
        if (rows := self._key_rows.get((rank, receiver))) is None:
            parts = [self._slices(peer, rank).k_rows for peer in [receiver, *self.row(receiver)]]
            rows = self._key_rows[rank, receiver] = _union(parts)
        return rows

    def slices(self, q_rank: int, k_rank: int, at: int) -> Slices:
        """Return the slices of one rank's queries over another's keys, as the rank `at` has them.

        `q_rank` is in the row of `at`, and `k_rank` in its column. The rank has all rows of its own
        tensors, and of the others the rows that travelled to it.
        """
        slices = self._slices(q_rank, k_rank)
        if q_rank != at:
            slices = slices.of_queries(self.query_rows(q_rank, at))
        return slices if k_rank == at else slices.of_keys(self.key_rows(k_rank, at))

    def area(self, q_rank: int, k_rank: int) -> int:
        """Return the number of (query, key) pairs between one rank's queries and another's keys."""
        return self._slices(q_rank, k_rank).area

    def _slices(self, q_rank: int, k_rank: int) -> Slices:
        if (slices := self._local.get((q_rank, k_rank))) is None:
            queries, keys, mask = self._geometry
            slices = local_slices(queries, q_rank, keys, k_rank, mask)
            self._local[q_rank, k_rank] = slices
        return slices


def _union(parts: list[Ints]) -> Ints:
    """Return the union of ranges in any order, as (m, 2)."""
    starts, stops = np.concatenate(parts).T
    order = np.argsort(starts, kind="stable")
    return union(starts[order], stops[order])


class Tile(NamedTuple):
    """The exchanges and slices of one rank, decided once per layout and mask.

    Attributes:
        keys: how keys travel in its column, one rank per step.
        query_hops: how queries travel in its row; their steps are numbered after those of keys.
        own: the slices of its own queries over each block of keys, in two halves, for backward:
            gradients of a block leave while the second halves are computed.
        last: the block of keys of which forward leaves work for the end, and its slices: all of
            them or, if the block is its own keys, half of them.
    """

    keys: KeyPlan
    query_hops: list[QueryHop]
    own: list[tuple[Slices, Slices]]
    last: tuple[int, Slices]

    @classmethod
    def of(cls, call: ResolvedCall, tiles: Tiles) -> Tile:
        """Return the tile of the call's rank."""
        steps = _key_steps(call.rank, tiles)
        blocks = [tiles.slices(call.rank, call.rank, call.rank), *(step.slices for step in steps)]
        own = [halves(slices) for slices in blocks]
        keys = KeyPlan(steps, Blocks(tuple(blocks)), own[0])
        last = max((i for i, slices in enumerate(blocks) if len(slices)), default=0)
        last_slices = blocks[last] if last else own[0][1]
        return cls(keys, _query_hops(call.rank, tiles), own, (last, last_slices))

    def first(self, block: int) -> Slices | None:
        """Return the slices over a block of keys that forward begins with."""
        if block != self.last[0]:
            return self.keys.blocks.slices[block]
        return None if block else self.own[0][0]


def _key_steps(rank: int, tiles: Tiles) -> list[KeyStep]:
    column, steps = tiles.column(rank), list[KeyStep]()
    known: dict[bytes, Rows] = {}
    for number, (receiver, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
        slices, sent = tiles.slices(rank, owner, rank), tiles.key_rows(rank, receiver)
        rows, arriving = known.setdefault(sent.tobytes(), Rows(sent)), slices.key_rows
        to, sent_counts = ([(receiver, rows)], [rows.count]) if rows.count else ([], [])
        source, counts = ([owner], [arriving]) if arriving else ([], [])
        totals = arriving, rows.count
        steps.append(KeyStep(number, to, source, counts, sent_counts, *totals, slices))
    return with_reuse(steps)


def _query_hops(rank: int, tiles: Tiles) -> list[QueryHop]:
    row, column, hops = tiles.row(rank), tiles.column(rank), []
    sources = [rank, *reversed(column)]
    first_step = len(column) + 1
    for step, (receiver, sender) in enumerate(zip(row, reversed(row), strict=True), first_step):
        sent = Rows(tiles.query_rows(rank, receiver))
        received = Rows(tiles.query_rows(sender, rank))
        slices = [tiles.slices(sender, x, rank) for x in sources] if received.count else []
        blocks = Blocks(tuple(slices)) if slices else None
        hops.append(QueryHop(step, receiver, sender, sent, received, blocks))
    return hops
