"""The rows that travel if ranks form a mesh and each one computes a tile of queries and keys.

A rank's tile is the queries of all ranks of its row over the keys of all ranks of its column. Every
pair of ranks, one with queries and one with keys, is therefore in exactly one tile: it belongs to
the rank where the row of the first crosses the column of the second.
"""

from __future__ import annotations

import weakref
from functools import cached_property, partial

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask, Slices, halves, local_slices
from seqpar.layout.masks.reach import AttentionSide, ReachedRows
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.key_plan import KeyStep, with_rows
from seqpar.softmax.queries.query_exchange import QueryHop
from seqpar.softmax.result_dtypes import hops_are_one_call, is_one_call
from seqpar.softmax.wire.row_messages import Rows


class Tiles:
    """The tiles of all ranks of a call, on a mesh whose ranks are counted along its rows.

    It does not keep the layouts alive, because plans that are kept with the layouts use it.
    """

    def __init__(self, queries: Geometry, keys: Geometry, mask: Mask, columns: int) -> None:
        self._weak_queries, self._weak_keys = weakref.ref(queries), weakref.ref(keys)
        self._mask, self._columns, self._ranks = mask, columns, queries.ranks
        self._query_rows: dict[tuple[int, int], Ints] = {}
        self._key_rows: dict[tuple[int, int], Ints] = {}

    def row(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's row, in the order in which it sends them queries."""
        first = rank - rank % self._columns
        return [first + (rank + step) % self._columns for step in range(1, self._columns)]

    def column(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's column, in the order in which it sends them keys."""
        ranks, columns = self._ranks, self._columns
        return [other % ranks for other in range(rank + columns, rank + ranks, columns)]

    def row_number(self, rank: int) -> int:
        return rank // self._columns

    def column_number(self, rank: int) -> int:
        return rank % self._columns

    def query_rows(self, rank: int, receiver: int) -> Ints:
        """Return (m, 2): ranges of a rank's queries that travel to another rank of its row.

        These are the queries that attend to a key of the receiver's column.
        """
        if (rows := self._query_rows.get((rank, receiver))) is None:
            queries, keys = self._geometry
            column = [keys.holdings[peer] for peer in [receiver, *self.column(receiver)]]
            rows = self._side_of_queries.own_ranges(queries.holdings[rank], column)
            self._query_rows[rank, receiver] = rows
        return rows

    def key_rows(self, rank: int, receiver: int) -> Ints:
        """Return (m, 2): ranges of a rank's keys that travel to another rank of its column.

        These are the keys that queries of the receiver's row attend to.
        """
        if (rows := self._key_rows.get((rank, receiver))) is None:
            queries, keys = self._geometry
            row = [queries.holdings[peer] for peer in [receiver, *self.row(receiver)]]
            rows = self._side_of_keys.own_ranges(keys.holdings[rank], row)
            self._key_rows[rank, receiver] = rows
        return rows

    def sent_queries(self, rank: int) -> ReachedRows:
        """Return the queries that a rank sends to the rank of its row in each column."""
        queries, groups = self._geometry[0], np.arange(self._ranks) % self._columns
        groups_of_ranks = groups if self._columns < self._ranks else None
        return self._side_of_queries.own_rows(queries.holdings[rank], groups_of_ranks)

    def sent_keys(self, rank: int) -> ReachedRows:
        """Return the keys that a rank sends to the rank of its column in each row."""
        keys, groups = self._geometry[1], np.arange(self._ranks) // self._columns
        groups_of_ranks = groups if self._columns > 1 else None
        return self._side_of_keys.own_rows(keys.holdings[rank], groups_of_ranks)

    def received_queries(self, rank: int) -> Ints:
        """Return how many queries of each rank, (ranks,), attend to a key of a rank's column."""
        column = self._geometry[1].merged_holding([rank, *self.column(rank)])
        return self._side_of_keys.their_rows(column)

    def received_keys(self, rank: int) -> Ints:
        """Return how many keys of each rank, (ranks,), queries of a rank's row attend to."""
        row = self._geometry[0].merged_holding([rank, *self.row(rank)])
        return self._side_of_queries.their_rows(row)

    def slices(self, q_rank: int, k_rank: int, at: int) -> Slices:
        """Return the slices of one rank's queries over another's keys, as the rank `at` has them.

        `q_rank` is in the row of `at`, and `k_rank` in its column. The rank has all rows of its
        tensors, and those rows of other ranks that travelled to it.
        """
        slices = self._slices(q_rank, k_rank)
        if q_rank != at:
            slices = slices.of_queries(self.query_rows(q_rank, at))
        return slices if k_rank == at else slices.of_keys(self.key_rows(k_rank, at))

    def known_calls(self) -> bool | None:
        """Return whether one kernel call computes with another rank's queries, without slices.

        It is False if a rank has several blocks of keys, True if `hops_are_one_call`, and otherwise
        None: it then depends on the two ranks.
        """
        if self._columns < self._ranks:
            return False
        return hops_are_one_call(*self._geometry, self._mask) or None

    def is_one_call(self, q_rank: int, at: int, backward: bool) -> bool:
        """Return whether one kernel call of the rank `at` computes with another rank's queries."""
        known = self.known_calls()
        return is_one_call(self.slices(q_rank, at, at), backward) if known is None else known

    def area(self, q_rank: int, k_rank: int) -> int:
        """Return the number of (query, key) pairs between one rank's queries and another's keys."""
        return self._slices(q_rank, k_rank).area

    @property
    def _geometry(self) -> tuple[Geometry, Geometry]:
        queries, keys = self._weak_queries(), self._weak_keys()
        assert queries is not None and keys is not None
        return queries, keys

    @property
    def _side_of_queries(self) -> AttentionSide:
        return AttentionSide.of_queries(*self._geometry, self._mask)

    @property
    def _side_of_keys(self) -> AttentionSide:
        return AttentionSide.of_keys(*self._geometry, self._mask)

    def _slices(self, q_rank: int, k_rank: int) -> Slices:
        queries, keys = self._geometry
        return local_slices(queries, q_rank, keys, k_rank, self._mask)


class Tile:
    """The exchanges and slices of one rank, decided once per layout and mask.

    Which ranks exchange how many rows is known at the start. The slices of queries that arrive are
    built when their hop is computed, while other hops travel.
    """

    def __init__(self, call: ResolvedCall, tiles: Tiles, every_hop: bool = False) -> None:
        rank = call.rank
        self.steps = _key_steps(rank, tiles)  # how keys travel in its column, one rank per step
        own = partial(tiles.slices, rank, rank, rank)
        # The slices of the rank's queries over its keys and over the keys of each step.
        self.blocks = [own(), *(step.slices for step in self.steps)]
        # How queries travel in its row; their steps are numbered after those of keys. Hops in which
        # no rows travel are left out, unless `every_hop`.
        self.query_hops = _query_hops(rank, tiles, every_hop)
        # The number of the last hop, which may be left out.
        self.last_step = len(tiles.column(rank)) + len(tiles.row(rank))
        self.hop_count = len(tiles.row(rank))  # with those that were left out

    @cached_property
    def own(self) -> list[tuple[Slices, Slices]]:
        """The slices of own queries over each block of keys, in two halves, for backward.

        Gradients of a block leave while the second halves are computed.
        """
        return [halves(slices) for slices in self.blocks]

    @cached_property
    def last(self) -> tuple[int, Slices]:
        """The block of keys of which forward leaves work for the end, and the slices of that work.

        These are all slices of the block or, if it is the rank's own keys, half of them.
        """
        last = max((i for i, slices in enumerate(self.blocks) if len(slices)), default=0)
        return last, self.blocks[last] if last else self.own[0][1]

    def first(self, block: int) -> Slices | None:
        """Return the slices over a block of keys that forward begins with."""
        if block != self.last[0]:
            return self.blocks[block]
        return None if block else self.own[0][0]


def _key_steps(rank: int, tiles: Tiles) -> list[KeyStep]:
    column = tiles.column(rank)
    if not column:
        return []
    sent, received = tiles.sent_keys(rank).counts, tiles.received_keys(rank)
    rows_for = partial(_rows_for, tiles, rank, {})
    steps = []
    for number, (receiver, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
        leaving = with_rows([receiver], [int(sent[tiles.row_number(receiver)])])
        arriving = with_rows([owner], [int(received[owner])])
        build = partial(tiles.slices, rank, owner, rank)
        calls = (_are_one_call,) * 2
        steps.append(KeyStep(number, *leaving, *arriving, rows_for, build, *calls))
    return steps


def _are_one_call() -> bool:
    """Several kernel calls compute with keys: for halves of own queries and received queries."""
    return False


def _rows_for(tiles: Tiles, rank: int, known: dict[bytes, Rows], receiver: int) -> Rows:
    """Return the rows that travel to a receiver: one object for equal rows."""
    rows = tiles.key_rows(rank, receiver)
    return known.setdefault(rows.tobytes(), Rows(rows))


def _query_hops(rank: int, tiles: Tiles, every_hop: bool) -> list[QueryHop]:
    row, column = tiles.row(rank), tiles.column(rank)
    if not row:
        return []
    sent, received = tiles.sent_queries(rank).counts, tiles.received_queries(rank)
    sources, hops, known = [rank, *reversed(column)], list[QueryHop](), tiles.known_calls()
    first_step = len(column) + 1
    for step, (receiver, sender) in enumerate(zip(row, reversed(row), strict=True), first_step):
        counts = int(sent[tiles.column_number(receiver)]), int(received[sender])
        if every_hop or any(counts):
            sent_rows = partial(tiles.query_rows, rank, receiver)
            received_rows = partial(tiles.query_rows, sender, rank)
            builders = [partial(tiles.slices, sender, source, rank) for source in sources]
            rows = *counts, sent_rows, received_rows
            returning = known, partial(tiles.slices, rank, receiver, receiver)
            hops.append(QueryHop(step, receiver, sender, *rows, builders, *returning))
    return hops
