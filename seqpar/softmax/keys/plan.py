"""Decide, once for a layout and a mask, which key rows travel in which step, and to whom.

In a step a rank sends rows to the ranks at some distances ahead of it, counted around the ring of
all ranks, and receives rows of those as far behind it. A strategy is a choice of these distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.layout.masks.blocks import Blocks
from seqpar.layout.masks.mask import Slices
from seqpar.layout.masks.split_work import halves
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.wire.quantize import encoded_width
from seqpar.softmax.wire.row_messages import Rows

Distances = Sequence[Sequence[int]]  # of each step


class KeyStep(NamedTuple):
    """An exchange of key rows, as one rank takes part in it.

    Attributes:
        number: what errors, traces and traffic call it.
        to: the ranks that it sends rows to, each with the rows that their queries see.
        source: the ranks whose rows arrive, those that this rank's queries see.
        counts: how many rows arrive from each.
        sent_counts: how many rows it sends to each rank of `to`.
        rows, sent_rows: how many rows arrive, and are sent, in all.
        slices: of this rank's queries over the block of all these rows.
        reused: whether the next step first sends the rows that this one sends last.
    """

    number: int
    to: list[tuple[int, Rows]]
    source: list[int]
    counts: list[int]
    sent_counts: list[int]
    rows: int
    sent_rows: int
    slices: Slices
    reused: bool = False

    @property
    def travels(self) -> bool:
        """Whether rows arrive or are sent."""
        return bool(self.rows or self.sent_rows)


@dataclass(frozen=True)
class KeyPlan:
    """What a rank sends, receives and computes, step by step.

    Attributes:
        steps: all of them, also those in which nothing travels to this rank or from it, so that
            all ranks post their exchanges in the same order.
        blocks: for forward, the slices over this rank's own keys, and over each step's.
        own: for backward, the slices over its own keys: one part is computed before the first
            step, while keys arrive, and another behind the last, while gradients return.
    """

    steps: list[KeyStep]
    blocks: Blocks
    own: tuple[Slices, ...]

    @classmethod
    def of(cls, call: ResolvedCall, distances: Distances) -> KeyPlan:
        """Return the plan of the call's rank."""
        steps: list[KeyStep] = []
        known: dict[bytes, Rows] = {}
        for number, step in enumerate(distances, start=1):
            seen = {peer: call.slices(peer, call.rank) for peer in _ahead(call, step)}
            to = []
            for peer, slices in seen.items():
                rows = known.setdefault(slices.sent_rows.tobytes(), Rows(slices.sent_rows))
                to += [(peer, rows)] if rows.count else []
            behind = _behind(call, step)
            arriving = {peer: call.slices(call.rank, peer).key_rows for peer in behind}
            source = [peer for peer, count in arriving.items() if count]
            counts = [arriving[peer] for peer in source]
            alone = len(behind) == 1
            slices = (
                call.slices(call.rank, behind[0]) if alone else call.slices_over(call.rank, behind)
            )
            sent_counts = [rows.count for _, rows in to]
            totals = sum(counts), sum(sent_counts)
            steps.append(KeyStep(number, to, source, counts, sent_counts, *totals, slices))
        steps = with_reuse(steps)
        own = call.slices(call.rank, call.rank)
        blocks = Blocks((own, *(step.slices for step in steps)))
        travels = any(step.travels for step in steps)
        return cls(steps, blocks, halves(own) if travels else (own,))


def with_reuse(steps: list[KeyStep]) -> list[KeyStep]:
    """Return the steps, with what says whether the next one sends the same rows."""
    for i, (one, following) in enumerate(pairwise(steps)):
        reused = bool(one.to and following.to) and one.to[-1][1] is following.to[0][1]
        steps[i] = one._replace(reused=reused)
    return steps


def key_areas(call: ResolvedCall, rank: int, distances: Distances) -> list[int]:
    """Return the area that a rank computes: with its own keys, and in each step."""
    parts = [[rank], *(_behind(call, step, rank) for step in distances)]
    heads = call.shape.heads
    return [sum(call.slices(rank, peer).area for peer in part) * heads for part in parts]


def key_traffic(
    call: ResolvedCall,
    rank: int,
    distances: Distances,
    message_dtype: torch.dtype | None = None,
    returning: bool = True,
) -> list[Traffic]:
    """Return what a rank sends: keys and values in both passes, and if `returning` gradients."""
    shape, rows = call.shape, []
    dims, heads = (shape.dim, shape.value_dim), shape.batch * shape.kv_heads
    size = heads * sum(dims) * shape.dtype.itemsize  # bytes of a row
    if message_dtype == torch.int8:
        size = heads * encoded_width(dims)
    gradient_size = heads * sum(dims) * accumulator_dtype(shape.dtype).itemsize
    for number, step in enumerate(distances, start=1):
        for peer in _ahead(call, step, rank):
            total = call.slices(peer, rank).key_rows * size
            rows += [Traffic(x, number, peer, 1, total) for x in ("forward", "backward")]
        for peer in _behind(call, step, rank) if returning else ():
            total = call.slices(rank, peer).key_rows * gradient_size
            rows.append(Traffic("backward", number, peer, 1, total))
    return rows


def _ahead(call: ResolvedCall, step: Sequence[int], rank: int | None = None) -> list[int]:
    """Return the ranks to which a rank (default: the call's) sends rows in a step."""
    first = call.rank if rank is None else rank
    return [(first + distance) % call.ranks for distance in step]


def _behind(call: ResolvedCall, step: Sequence[int], rank: int | None = None) -> list[int]:
    """Return the ranks whose rows arrive at a rank (default: the call's) in a step."""
    first = call.rank if rank is None else rank
    return [(first - distance) % call.ranks for distance in step]
