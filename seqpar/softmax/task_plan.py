"""Decide, once for a layout, a mask and tasks, what one rank sends, computes and returns.

Every rank is home of the tokens that it holds, and server of the tasks that it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.arguments import Ints
from seqpar.layout.blocks import Blocks
from seqpar.layout.halves import halves
from seqpar.layout.mask import Slices
from seqpar.layout.task_rows import Block, Segments, TaskRows, arriving_at, sent_by
from seqpar.layout.task_slices import task_slices
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.rows import Rows


class Sent(NamedTuple):
    """Rows of this rank that travel to a peer."""

    peer: int
    rows: Rows


class Came(NamedTuple):
    """How many rows of a peer come, one peer's behind another's."""

    peer: int
    rows: int


class Stage(NamedTuple):
    """What travels at once, and is computed when it has arrived.

    Attributes:
        number: what errors, traces and traffic call it.
        queries_to, keys_to: this rank's rows that servers need.
        guests, keys: rows of others that this rank, as a server, needs.
        guest_rows, key_rows: where they are in the blocks of all stages.
        blocks: the slices of the guests over this rank's keys, and over the block of all keys that
            come to it.
    """

    number: int
    queries_to: list[Sent]
    keys_to: list[Sent]
    guests: list[Came]
    keys: list[Came]
    guest_rows: slice
    key_rows: slice
    blocks: Blocks


class TaskPlan(NamedTuple):
    """What a rank sends, computes and returns.

    Attributes:
        stages: all of them, also those in which nothing travels to this rank or from it.
        first, last: slices of this rank's queries over its own keys. The first are computed while
            rows travel, and the last while results return.
        arrived: slices of its queries over the block of all keys that come to it.
        guests, keys: how many rows come to it, in all stages.
    """

    stages: list[Stage]
    first: Slices
    last: Slices
    arrived: Slices
    guests: int
    keys: int

    @classmethod
    def of(cls, call: ResolvedCall, rows: TaskRows) -> TaskPlan:
        """Return the plan of the call's rank."""
        rank, count = call.rank, rows.stages
        queries = Block.local(call.layout, rank)
        keys = Block.local(call.kv_layout, rank)
        parts, known = rows.of_server(rank), dict[bytes, Rows]()
        moving = (call.layout, rows.queries), (call.kv_layout, rows.keys)
        guests, arriving = (arriving_at(rank, *each, count) for each in moving)
        queries_to, keys_to = (_by_stage(sent_by(rank, *each), count, known) for each in moving)
        key_block = Block.joined(arriving)
        stages, guest_row, key_row = [], 0, 0
        for number in range(count):
            block, of_keys = guests[number], arriving[number]
            end, key_end = guest_row + block.holding.tokens, key_row + of_keys.holding.tokens
            slices = (task_slices(parts, block, keys), task_slices(parts, block, key_block))
            stages.append(
                Stage(
                    number,
                    queries_to[number],
                    keys_to[number],
                    _came(block),
                    _came(of_keys),
                    slice(guest_row, end),
                    slice(key_row, key_end),
                    Blocks(slices),
                )
            )
            guest_row, key_row = end, key_end
        arrived = task_slices(parts, queries, key_block)
        first, last = halves(task_slices(parts, queries, keys))
        return cls(stages, first, last, arrived, guest_row, key_row)


def _by_stage(sent: Segments, count: int, known: dict[bytes, Rows]) -> list[list[Sent]]:
    """Return what is sent in each stage; `known` has rows that several servers get."""
    stages: list[list[Sent]] = [[] for _ in range(count)]
    order = np.lexsort((sent.servers, sent.stages))
    servers, stage = sent.servers[order], sent.stages[order]
    ranges = np.stack([sent.starts, sent.stops], 1)[order]
    begins = np.flatnonzero(np.r_[True, (np.diff(servers) != 0) | (np.diff(stage) != 0)])
    for first, last in zip(begins, np.r_[begins[1:], servers.size], strict=True):
        if last > first:
            table: Ints = ranges[first:last]
            rows = known.setdefault(table.tobytes(), Rows(table))
            stages[int(stage[first])].append(Sent(int(servers[first]), rows))
    return stages


def _came(block: Block) -> list[Came]:
    return [Came(*pair) for pair in zip(block.ranks, block.counts, strict=True)]
