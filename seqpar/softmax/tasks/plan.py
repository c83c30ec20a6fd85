"""Decide, once for a layout, a mask and tasks, what one rank sends, computes and returns.

Every rank is home of the tokens that it holds, and server of the tasks that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.ranges import union
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.blocks import Blocks
from seqpar.layout.masks.mask import Slices
from seqpar.layout.masks.split_work import halves
from seqpar.layout.tasks.segments import Segments
from seqpar.layout.tasks.slices import task_slices
from seqpar.layout.tasks.task_rows import ServerRows, Stages, TaskRows, arriving_at, sent_by
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.wire.row_messages import Rows


class Sent(NamedTuple):
    """Rows of this rank that travel to a peer."""

    peer: int
    rows: Rows


class Shipment(NamedTuple):
    """Rows that travel in one stage, and whose results or gradients return in one.

    Attributes:
        stages: which need the rows.
        sent: rows of this rank, in the order of their servers.
        block: rows that come, those of one peer behind another's.
        rows: where these are in the block of all that come.
    """

    stages: Stages
    sent: list[Sent]
    block: ServerRows
    rows: slice


class TaskStage(NamedTuple):
    """What travels at once, and is computed when it has come.

    Attributes:
        number: what errors, traces and traffic call it.
        queries: those that visit servers, of which this rank is one.
        keys: those that come.
        done: those that no later stage needs.
        blocks: the slices of the guests over this rank's keys, and over the block of all keys.
        own: the slices of this rank's queries over keys that have come.
        key_rows: where these are in the block of all keys.
    """

    number: int
    queries: Shipment
    keys: list[Shipment]
    done: list[Shipment]
    blocks: Blocks
    own: Slices
    key_rows: slice


class TaskPlan(NamedTuple):
    """What a rank sends, computes and returns.

    Attributes:
        stages: all of them, also those in which nothing travels to this rank or from it.
        first, last: slices of this rank's queries over its own keys. The first are computed while
            rows travel, and the last while results return.
        guests, keys: how many rows come to it, in all stages.
        away: whether some of its queries are, so that results return.
    """

    stages: list[TaskStage]
    first: Slices
    last: Slices
    guests: int
    keys: int
    away: bool

    @classmethod
    def of(cls, call: ResolvedCall, rows: TaskRows) -> TaskPlan:
        """Return the plan of the call's rank."""
        rank, parts = call.rank, rows.of_server(call.rank)
        shift = call.kv_layout.lengths - call.layout.lengths
        own, own_keys = ServerRows.local(call.layout, rank), ServerRows.local(call.kv_layout, rank)
        queries = _shipments(rank, call.layout, rows.queries, rows.stages)
        keys = _shipments(rank, call.kv_layout, rows.keys, rows.stages)
        all_keys = ServerRows.joined([x.block for x in keys])
        stages, first_key = [], sum(x.block.holding.tokens for x in keys if x.stages.own < 0)
        for number in range(rows.stages):
            of_stage = [x for x in queries if x.stages.first == number]
            nothing = Shipment(Stages(-1, number, number), [], ServerRows.joined([]), slice(0, 0))
            guests = of_stage[0] if of_stage else nothing
            block = ServerRows.joined([x.block for x in keys if x.stages.own == number])
            over = (task_slices(parts, guests.block, x, shift) for x in (own_keys, all_keys))
            stop_key = first_key + block.holding.tokens
            stage = TaskStage(
                number,
                guests,
                [x for x in keys if x.stages.first == number],
                [x for x in keys if x.stages.last == number],
                Blocks(tuple(over)),
                task_slices(parts, own, block, shift),
                slice(first_key, stop_key),
            )
            stages.append(stage)
            first_key = stop_key
        guest_rows = sum(x.block.holding.tokens for x in queries)
        away = any(x.sent for x in queries)
        at_home = halves(task_slices(parts, own, own_keys, shift))
        return cls(stages, *at_home, guest_rows, first_key, away)


def _shipments(rank: int, geometry: Geometry, needed: Segments, count: int) -> list[Shipment]:
    """Return what leaves a rank and what comes to it, in order of their stages."""
    leaving, coming = (
        _leaving(rank, geometry, needed, count),
        arriving_at(rank, geometry, needed, count),
    )
    shipments, row = [], 0
    for stages in sorted({*leaving, *coming}):
        block = coming.get(stages) or ServerRows.joined([])
        stop = row + block.holding.tokens
        shipments.append(Shipment(stages, leaving.get(stages, []), block, slice(row, stop)))
        row = stop
    return shipments


def _leaving(
    rank: int, geometry: Geometry, needed: Segments, count: int
) -> dict[Stages, list[Sent]]:
    """Return what a rank sends, by its stages."""
    sent = sent_by(rank, geometry, needed, count)
    order = np.lexsort((sent.servers, sent.lasts, sent.firsts, sent.owns))
    labels = np.stack([sent.owns, sent.firsts, sent.lasts, sent.servers])[:, order]
    starts, stops = sent.starts[order], sent.stops[order]
    begins = np.flatnonzero(np.r_[True, (labels[:, 1:] != labels[:, :-1]).any(0)])
    known: dict[bytes, Rows] = {}  # several servers may get the same rows
    leaving: dict[Stages, list[Sent]] = {}
    for begin, end in zip(begins, np.r_[begins[1:], order.size], strict=True):
        if end > begin:
            *stages, server = labels[:, begin].tolist()
            ranges = union(starts[begin:end], stops[begin:end])
            rows = known.setdefault(ranges.tobytes(), Rows(ranges))
            leaving.setdefault(Stages(*stages), []).append(Sent(server, rows))
    return leaving
