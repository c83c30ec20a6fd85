"""Decide, once for a layout and a mask, which rows travel in a rank's row and in its column."""

from __future__ import annotations

from typing import NamedTuple

from seqpar.layout.masks.blocks import Blocks
from seqpar.layout.masks.mask import Slices
from seqpar.layout.masks.split_work import halves
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.plan import KeyPlan, KeyStep, with_reuse
from seqpar.softmax.queries.exchange import QueryHop
from seqpar.softmax.queries.mesh_rows import Tiles
from seqpar.softmax.wire.row_messages import Rows


class Tile(NamedTuple):
    """What a rank of a mesh sends, receives and computes.

    Attributes:
        keys: how keys travel within its column: step by step, one rank's in each.
        meetings: how queries travel within its row, in steps numbered behind those of keys.
        own: the slices of its own queries over its own keys, and over those of each step, all in
            two halves: for backward, where gradients of each block of keys leave.
        last: of which block forward leaves work for last, and its slices: all of those of the last
            block that they see, or half of those over its own keys.
    """

    keys: KeyPlan
    meetings: list[QueryHop]
    own: list[tuple[Slices, Slices]]
    last: tuple[int, Slices]

    @classmethod
    def of(cls, call: ResolvedCall, tiles: Tiles) -> Tile:
        """Return the tile of the call's rank."""
        steps = _key_steps(call.rank, tiles)
        blocks = [tiles.slices(call.rank, call.rank, call.rank), *(step.slices for step in steps)]
        own = [halves(slices) for slices in blocks]
        keys = KeyPlan(steps, Blocks(tuple(blocks)), own[0])
        left = max((i for i, slices in enumerate(blocks) if len(slices)), default=0)
        last = left, blocks[left] if left else own[0][1]
        return cls(keys, _meetings(call.rank, tiles), own, last)

    def first(self, block: int) -> Slices | None:
        """Return the slices over a block of keys that forward begins with."""
        if block != self.last[0]:
            return self.keys.blocks.slices[block]
        return None if block else self.own[0][0]


def _key_steps(rank: int, tiles: Tiles) -> list[KeyStep]:
    column, steps = tiles.column(rank), list[KeyStep]()
    known: dict[bytes, Rows] = {}
    for number, (host, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
        slices, seen = tiles.slices(rank, owner, rank), tiles.seen(rank, host)
        rows, arriving = known.setdefault(seen.tobytes(), Rows(seen)), slices.key_rows
        to, sent_counts = ([(host, rows)], [rows.count]) if rows.count else ([], [])
        source, counts = ([owner], [arriving]) if arriving else ([], [])
        totals = arriving, rows.count
        steps.append(KeyStep(number, to, source, counts, sent_counts, *totals, slices))
    return with_reuse(steps)


def _meetings(rank: int, tiles: Tiles) -> list[QueryHop]:
    row, column, found = tiles.row(rank), tiles.column(rank), []
    sources = [rank, *reversed(column)]
    for step, (host, guest) in enumerate(zip(row, reversed(row), strict=True), len(column) + 1):
        away, here = Rows(tiles.seeing(rank, host)), Rows(tiles.seeing(guest, rank))
        slices = [tiles.slices(guest, x, rank) for x in sources] if here.count else []
        blocks = Blocks(tuple(slices)) if slices else None
        found.append(QueryHop(step, host, guest, away, here, blocks))
    return found
