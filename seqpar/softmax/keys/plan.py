"""Decide, once per layout and mask, which key rows travel in which step, and to which ranks.

Ranks are counted around a ring. In a step with distances d, rank r sends rows to ranks r + d and
receives rows of ranks r − d. A strategy is a choice of the distances of each step.
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

Distances = Sequence[Sequence[int]]  # for each step


class KeyStep(NamedTuple):
    """An exchange of key rows, as one rank takes part in it.

    Attributes:
        number: its number in errors, traces and traffic.
        to: the ranks that get rows of this rank, each with the rows that its queries attend to.
        source: the ranks whose rows arrive here.
        counts: how many rows arrive from each rank of `source`.
        sent_counts: how many rows go to each rank of `to`.
        rows, sent_rows: how many rows arrive and are sent in total.
        slices: slices of this rank's queries over the block of all rows that arrive.
        reused: whether the rows that this step sends last are the first that the next step sends.
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
        return bool(self.rows or self.sent_rows)


@dataclass(frozen=True)
class KeyPlan:
    """The exchanges and slices of one rank, step by step.

    Attributes:
        steps: all steps, including those in which this rank sends and receives no rows: all ranks
            post their exchanges in the same order.
        blocks: for forward, the slices over this rank's own keys and over the keys of each step.
        own: for backward, the slices over its own keys. If rows travel these are two halves, one to
            compute before the first step, while keys arrive, and one after the last step, while
            gradients return. Undivided, 11% of Ring's transfer and 80% of AllGather's were exposed.
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
            visible = {peer: call.slices(peer, call.rank) for peer in _ahead(call, step)}
            to = []
            for peer, slices in visible.items():
                rows = known.setdefault(slices.sent_rows.tobytes(), Rows(slices.sent_rows))
                to += [(peer, rows)] if rows.count else []
            behind = _behind(call, step)
            arriving = {peer: call.slices(call.rank, peer).key_rows for peer in behind}
            source = [peer for peer, count in arriving.items() if count]
            counts = [arriving[peer] for peer in source]
            if len(behind) == 1:
                slices = call.slices(call.rank, behind[0])
            else:
                slices = call.slices_over(call.rank, behind)
            sent_counts = [rows.count for _, rows in to]
            totals = sum(counts), sum(sent_counts)
            steps.append(KeyStep(number, to, source, counts, sent_counts, *totals, slices))
        steps = with_reuse(steps)
        own = call.slices(call.rank, call.rank)
        blocks = Blocks((own, *(step.slices for step in steps)))
        travels = any(step.travels for step in steps)
        return cls(steps, blocks, halves(own) if travels else (own,))


def with_reuse(steps: list[KeyStep]) -> list[KeyStep]:
    """Set `reused` of each step."""
    for i, (one, following) in enumerate(pairwise(steps)):
        reused = bool(one.to and following.to) and one.to[-1][1] is following.to[0][1]
        steps[i] = one._replace(reused=reused)
    return steps


def key_areas(call: ResolvedCall, rank: int, distances: Distances) -> list[int]:
    """Return the areas that a rank computes: over its own keys, then over the keys of each step."""
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
    """Return a rank's messages: keys and values in both passes, and gradients if `returning`."""
    shape, rows = call.shape, []
    dims, heads = (shape.dim, shape.value_dim), shape.batch * shape.kv_heads
    size = heads * sum(dims) * shape.dtype.itemsize  # bytes per row
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
    """Return the ranks that get rows of a rank (default: the call's) in a step."""
    first = call.rank if rank is None else rank
    return [(first + distance) % call.ranks for distance in step]


def _behind(call: ResolvedCall, step: Sequence[int], rank: int | None = None) -> list[int]:
    """Return the ranks whose rows a rank (default: the call's) gets in a step."""
    first = call.rank if rank is None else rank
    return [(first - distance) % call.ranks for distance in step]
