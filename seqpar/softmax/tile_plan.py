"""Decide, once for a layout and a mask, what travels within a rank's row and within its column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seqpar.layout.blocks import Blocks
from seqpar.layout.halves import halves
from seqpar.layout.mask import Slices
from seqpar.layout.tiles import Tiles
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.key_plan import KeyPlan, KeyStep, with_reuse
from seqpar.softmax.packing import Kind
from seqpar.softmax.rows import Rows
from seqpar.softmax.visits import Plan


class TilePlan(NamedTuple):
    """What a rank sends, receives and computes in a pass.

    Attributes:
        keys: how keys travel within its column: step by step, one rank's in each.
        visits: how queries travel within its row.
        own: the slices of its own queries over its own keys, and over those of each step, all in
            two halves: for backward, where gradients of each block of keys leave.
        last: of which block forward leaves work for last, and its slices: all of those of the last
            block that they see, or half of those over its own keys.
    """

    keys: KeyPlan
    visits: Plan
    own: list[tuple[Slices, Slices]]
    last: tuple[int, Slices]

    def first(self, block: int) -> Slices | None:
        """Return the slices over a block of keys that forward begins with."""
        if block != self.last[0]:
            return self.keys.blocks.slices[block]
        return None if block else self.own[0][0]

    @classmethod
    def of(
        cls, call: ResolvedCall, tiles: Tiles, travelling: Sequence[Kind], results: Sequence[Kind]
    ) -> TilePlan:
        """Return the pass in which these tensors of queries travel and return, and keys travel."""
        steps = _key_steps(call, tiles)
        blocks = [call.slices(call.rank, call.rank), *(step.slices for step in steps)]
        own = [halves(slices) for slices in blocks]
        keys = KeyPlan(steps, Blocks(tuple(blocks)), own[0])
        left = max((i for i, slices in enumerate(blocks) if len(slices)), default=0)
        last = left, blocks[left] if left else own[0][1]
        return cls(keys, Plan.of(call, tiles, travelling, results), own, last)


def _key_steps(call: ResolvedCall, tiles: Tiles) -> list[KeyStep]:
    rank, column, steps = call.rank, tiles.column(call.rank), list[KeyStep]()
    known: dict[bytes, Rows] = {}
    for number, (host, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
        slices, seen = tiles.slices(rank, owner, rank), tiles.seen(rank, host)
        rows, arriving = known.setdefault(seen.tobytes(), Rows(seen)), slices.key_rows
        to, sent_counts = ([(host, rows)], [rows.count]) if rows.count else ([], [])
        source, counts = ([owner], [arriving]) if arriving else ([], [])
        totals = arriving, rows.count
        steps.append(KeyStep(number, to, source, counts, sent_counts, *totals, slices))
    return with_reuse(steps)
