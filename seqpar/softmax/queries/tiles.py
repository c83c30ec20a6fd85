"""Find the rows that ranks send if each rank of a mesh computes one tile of queries and keys.

The *tile* of a rank is attention of the queries of all ranks in its mesh row over the keys of all
ranks in its mesh column. The queries of rank i and the keys of rank j are therefore in exactly one
tile: the tile of the rank where the mesh row of rank i crosses the mesh column of rank j.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
    """The work of all ranks of a mesh, and the rows that they send to each other for this work.

    Each rank computes one *tile*: attention of the queries of all ranks in its mesh row over the
    keys of all ranks in its mesh column. Ranks are numbered along the rows of the mesh. The object
    does not keep its layouts alive.
    """

    def __init__(self, queries: Geometry, keys: Geometry, mask: Mask, columns: int) -> None:
        self._weak_queries, self._weak_keys = weakref.ref(queries), weakref.ref(keys)
        self._mask, self._columns, self._ranks = mask, columns, queries.ranks
        self._query_rows: dict[tuple[int, int], Ints] = {}
        self._key_rows: dict[tuple[int, int], Ints] = {}

    def row(self, rank: int) -> list[int]:
        """Return the other ranks in the mesh row of `rank`, in the order in which `rank` sends
        queries.
        """
        first = rank - rank % self._columns
        return [first + (rank + step) % self._columns for step in range(1, self._columns)]

    def column(self, rank: int) -> list[int]:
        """Return the other ranks in the mesh column of `rank`, in the order in which `rank` sends
        keys.
        """
        ranks, columns = self._ranks, self._columns
        return [other % ranks for other in range(rank + columns, rank + ranks, columns)]

    def row_number(self, rank: int) -> int:
        return rank // self._columns

    def column_number(self, rank: int) -> int:
        return rank % self._columns

    def query_rows(self, rank: int, receiver: int) -> Ints:
        """Return the queries that a rank sends to another rank of its mesh row, as ranges (m, 2).

        These are the queries that attend to at least one key in the receiver's mesh column.
        """
        if (rows := self._query_rows.get((rank, receiver))) is None:
            queries, keys = self._geometry
            column = [keys.holdings[peer] for peer in [receiver, *self.column(receiver)]]
            rows = self._side_of_queries.own_ranges(queries.holdings[rank], column)
            self._query_rows[rank, receiver] = rows
        return rows

    def key_rows(self, rank: int, receiver: int) -> Ints:
        """Return the keys that a rank sends to another rank of its mesh column, as ranges (m, 2).

        These are the keys to which at least one query in the receiver's mesh row attends.
        """
        if (rows := self._key_rows.get((rank, receiver))) is None:
            queries, keys = self._geometry
            row = [queries.holdings[peer] for peer in [receiver, *self.row(receiver)]]
            rows = self._side_of_keys.own_ranges(keys.holdings[rank], row)
            self._key_rows[rank, receiver] = rows
        return rows

    def sent_queries(self, rank: int) -> ReachedRows:
        """Return, for each mesh column, the queries that a rank sends to this column.

        The receiver is the rank in the mesh row of the sender and in this mesh column.
        """
        queries, groups = self._geometry[0], np.arange(self._ranks) % self._columns
        groups_of_ranks = groups if self._columns < self._ranks else None
        return self._side_of_queries.own_rows(queries.holdings[rank], groups_of_ranks)

    def sent_keys(self, rank: int) -> ReachedRows:
        """Return, for each mesh row, the keys that a rank sends to this row.

        The receiver is the rank in the mesh column of the sender and in this mesh row.
        """
        keys, groups = self._geometry[1], np.arange(self._ranks) // self._columns
        groups_of_ranks = groups if self._columns > 1 else None
        return self._side_of_keys.own_rows(keys.holdings[rank], groups_of_ranks)

    def received_queries(self, rank: int) -> Ints:
        """Return how many of each rank's queries attend to keys in one mesh column, (ranks,).

        It is the mesh column of `rank`.
        """
        column = self._geometry[1].merged_holding([rank, *self.column(rank)])
        return self._side_of_keys.their_rows(column)

    def received_keys(self, rank: int) -> Ints:
        """Return how many of each rank's keys are attended to by queries in one mesh row, (ranks,).

        It is the mesh row of `rank`.
        """
        row = self._geometry[0].merged_holding([rank, *self.row(rank)])
        return self._side_of_queries.their_rows(row)

    def slices(self, q_rank: int, k_rank: int, at: int) -> Slices:
        """Return the slices that the rank `at` computes for queries of `q_rank` and keys of
        `k_rank`.

        A *slice* is a range of query rows and a range of key rows whose attention is computed.
        `q_rank` is in the mesh row of `at`, and `k_rank` is in its mesh column. If a rank sends
        rows to `at`, they are counted in the tensor that `at` receives.
        """
        slices = self._slices(q_rank, k_rank)
        if q_rank != at:
            slices = slices.of_queries(self.query_rows(q_rank, at))
        return slices if k_rank == at else slices.of_keys(self.key_rows(k_rank, at))

    def known_calls(self) -> bool | None:
        """Return whether a rank computes each other rank's queries in a single kernel call.

        The result is None if the answer may differ between pairs of ranks. On a mesh with several
        rows, it is False, because a rank computes the keys of several ranks one after another.
        """
        if self._columns < self._ranks:
            return False
        return hops_are_one_call(*self._geometry, self._mask) or None

    def is_one_call(self, q_rank: int, at: int, backward: bool) -> bool:
        """Return whether the rank `at` computes the queries of `q_rank` in a single kernel call."""
        known = self.known_calls()
        return is_one_call(self.slices(q_rank, at, at), backward) if known is None else known

    def area(self, q_rank: int, k_rank: int) -> int:
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
    """The messages and the work of one rank of a mesh, which are found once per layout and mask.

    The *tile* of a rank is attention of the queries of all ranks in its mesh row over the keys of
    all ranks in its mesh column.
    """

    def __init__(self, call: ResolvedCall, tiles: Tiles, every_hop: bool = False) -> None:
        rank = call.rank
        # The exchange of keys within the column, one rank per step.
        self.steps = _key_steps(rank, tiles)
        own = partial(tiles.slices, rank, rank, rank)
        # The slices of this rank's queries over its own keys, then over the keys of each step.
        self.blocks = [own(), *(step.slices for step in self.steps)]
        # The exchange of queries within the row. Hops are numbered after the steps of keys. Hops in
        # which this rank sends and receives no rows are left out, unless `every_hop`.
        self.query_hops = _query_hops(rank, tiles, every_hop)
        # The number of the last hop, even if it was left out.
        self.last_step = len(tiles.column(rank)) + len(tiles.row(rank))
        # the number of hops, including hops that were left out
        self.hop_count = len(tiles.row(rank))

    @cached_property
    def own(self) -> list[tuple[Slices, Slices]]:
        """The slices of this rank's queries and each block of keys, cut into two halves.

        A *slice* is a range of query rows and a range of key rows whose attention is computed.
        Backward computes the two halves separately.
        """
        return [halves(slices) for slices in self.blocks]

    @cached_property
    def last(self) -> tuple[int, Slices]:
        """The work that forward does at the end: the index of a block of keys, and slices over it.

        A *slice* is a range of query rows and a range of key rows whose attention is computed. If
        the block has the rank's own keys, the slices are half of the rank's work over the block. If
        it has the keys of another rank, they are all of this work.
        """
        last = max((i for i, slices in enumerate(self.blocks) if len(slices)), default=0)
        return last, self.blocks[last] if last else self.own[0][1]

    def first(self, block: int) -> Slices | None:
        """Return the slices over a block of keys that forward computes at the beginning.

        The result is None if forward computes the whole block at the end.
        """
        if block != self.last[0]:
            return self.blocks[block]
        return None if block else self.own[0][0]


def _key_steps(rank: int, tiles: Tiles) -> list[KeyStep]:
    column = tiles.column(rank)
    if not column:
        return []
    sent, received = tiles.sent_keys(rank).counts, tiles.received_keys(rank)
    rows_for = partial(_rows_for, partial(tiles.key_rows, rank), {})
    steps = []
    for number, (receiver, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
        leaving = with_rows([receiver], [int(sent[tiles.row_number(receiver)])])
        arriving = with_rows([owner], [int(received[owner])])
        build = partial(tiles.slices, rank, owner, rank)
        calls = (_are_one_call,) * 2
        steps.append(KeyStep(number, *leaving, *arriving, rows_for, build, *calls))
    return steps


def _are_one_call() -> bool:
    """Return False, because a rank computes attention over its own keys in several kernel calls."""
    return False


def _rows_for(ranges_for: Callable[[int], Ints], known: dict[bytes, Rows], receiver: int) -> Rows:
    rows = ranges_for(receiver)
    return known.setdefault(rows.tobytes(), Rows(rows))


def _query_hops(rank: int, tiles: Tiles, every_hop: bool) -> list[QueryHop]:
    row, column = tiles.row(rank), tiles.column(rank)
    if not row:
        return []
    sent, received = tiles.sent_queries(rank).counts, tiles.received_queries(rank)
    sources, hops, known = [rank, *reversed(column)], list[QueryHop](), tiles.known_calls()
    rows_for = partial(_rows_for, partial(tiles.query_rows, rank), {})
    first_step = len(column) + 1
    for step, (receiver, sender) in enumerate(zip(row, reversed(row), strict=True), first_step):
        counts = int(sent[tiles.column_number(receiver)]), int(received[sender])
        if every_hop or any(counts):
            sent_rows = partial(rows_for, receiver)
            received_rows = partial(tiles.query_rows, sender, rank)
            builders = [partial(tiles.slices, sender, source, rank) for source in sources]
            rows = *counts, sent_rows, received_rows
            returning = known, partial(tiles.slices, rank, receiver, receiver)
            hops.append(QueryHop(step, receiver, sender, *rows, builders, *returning))
    return hops
