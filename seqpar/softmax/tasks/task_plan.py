"""Plan the messages and the work of one rank, for given tasks.

A *task* is attention of some queries over some keys of one document, which one rank computes. A
rank is the *owner* of the tokens that it stores, and the *server* of the tasks that it computes.
*Foreign* queries and keys are those that a server receives from other ranks. They arrive in several
stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import shown
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import union
from seqpar.core.traffic import Traffic
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Blocks, Mask, Slices, halves
from seqpar.layout.tasks.task_rows import (
    Segments,
    ServerRows,
    Stages,
    TaskRows,
    arriving_at,
    sent_by,
    task_slices,
)
from seqpar.layout.tasks.tasks import TaskRectangles, as_tasks, check_tasks, digest_of
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.wire.row_messages import Rows


class Sent(NamedTuple):
    peer: int
    rows: Rows


class Shipment(NamedTuple):
    """Rows that are sent in the same stage, and whose results or gradients are sent back in the
    same stage.
    """

    stages: Stages  # the stages in which the servers need the rows
    sent: list[Sent]  # the rows that this rank sends, in the order of their servers
    block: ServerRows  # the rows that this rank receives, one owner after another
    rows: slice  # the indices of the received rows among all rows that this rank receives


class TaskStage(NamedTuple):
    """One stage: the rows that are received together, and the attention that is then computed."""

    number: int  # the number of the stage in errors, traces and traffic
    queries: Shipment  # the queries that are sent in the stage
    keys: list[Shipment]  # the keys that are sent in the stage
    done: list[Shipment]  # the keys that no later stage needs, so that their gradients can return
    # The slices of the foreign queries over this rank's keys, then over all foreign keys.
    blocks: Blocks
    own: Slices  # the slices of this rank's queries over the foreign keys `key_rows`
    # The indices, among all foreign keys, of the keys to which this rank's queries attend in the
    # stage.
    key_rows: slice


class TaskPlan(NamedTuple):
    # All stages, including stages in which this rank sends and receives no rows.
    stages: list[TaskStage]
    # The slices of this rank's queries over its own keys, in two halves. The first half is computed
    # while rows arrive, and the last half while results return.
    first: Slices
    last: Slices
    # How many query rows and key rows this rank receives, over all stages.
    foreign_queries: int
    foreign_keys: int
    # Whether other ranks compute some of this rank's queries, so that results return.
    sends_queries: bool

    @classmethod
    def of(cls, call: ResolvedCall, rows: TaskRows) -> TaskPlan:
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
            arriving = of_stage[0] if of_stage else nothing
            block = ServerRows.joined([x.block for x in keys if x.stages.own == number])
            over = (task_slices(parts, arriving.block, x, shift) for x in (own_keys, all_keys))
            stop_key = first_key + block.holding.tokens
            stage = TaskStage(
                number,
                arriving,
                [x for x in keys if x.stages.first == number],
                [x for x in keys if x.stages.last == number],
                Blocks(tuple(over)),
                task_slices(parts, own, block, shift),
                slice(first_key, stop_key),
            )
            stages.append(stage)
            first_key = stop_key
        foreign_queries = sum(x.block.holding.tokens for x in queries)
        sends_queries = any(x.sent for x in queries)
        local = halves(task_slices(parts, own, own_keys, shift))
        return cls(stages, *local, foreign_queries, first_key, sends_queries)


def _shipments(rank: int, geometry: Geometry, needed: Segments, count: int) -> list[Shipment]:
    """Return the rows that a rank sends and receives in each stage, in the order of the stages."""
    leaving, arriving = (
        _leaving(rank, geometry, needed, count),
        arriving_at(rank, geometry, needed, count),
    )
    shipments, row = [], 0
    for stages in sorted({*leaving, *arriving}):
        block = arriving.get(stages) or ServerRows.joined([])
        stop = row + block.holding.tokens
        shipments.append(Shipment(stages, leaving.get(stages, []), block, slice(row, stop)))
        row = stop
    return shipments


def _leaving(
    rank: int, geometry: Geometry, needed: Segments, count: int
) -> dict[Stages, list[Sent]]:
    sent = sent_by(rank, geometry, needed, count)
    order = np.lexsort((sent.servers, sent.lasts, sent.firsts, sent.owns))
    labels = np.stack([sent.owns, sent.firsts, sent.lasts, sent.servers])[:, order]
    starts, stops = sent.starts[order], sent.stops[order]
    begins = np.flatnonzero(np.r_[True, (labels[:, 1:] != labels[:, :-1]).any(0)])
    known: dict[bytes, Rows] = {}  # several servers may need the same rows
    leaving: dict[Stages, list[Sent]] = {}
    for begin, end in zip(begins, np.r_[begins[1:], order.size], strict=True):
        if end > begin:
            *stages, server = labels[:, begin].tolist()
            ranges = union(starts[begin:end], stops[begin:end])
            rows = known.setdefault(ranges.tobytes(), Rows(ranges))
            leaving.setdefault(Stages(*stages), []).append(Sent(server, rows))
    return leaving


def task_traffic(
    call: ResolvedCall, rows: TaskRows, direction: str, rank: int, kept: bool, groups: int
) -> Iterator[Traffic]:
    """Yield the messages that a rank sends in a forward or backward, if attention is cut into
    tasks.

    A *task* is attention of some queries over some keys, which one rank, the server, computes.

    Args:
        call: the arguments of the attention call, without the tensors.
        rows: the rows that each task needs.
        direction: "forward" or "backward".
        rank: the rank.
        kept: whether servers keep the rows that they receive in forward until backward. With True,
            backward does not send these rows again.
        groups: the number of groups in which heads are sent.
    """
    s = call.shape
    shipments = (
        _shipments(rank, call.layout, rows.queries, rows.stages),
        _shipments(rank, call.kv_layout, rows.keys, rows.stages),
    )
    queries, keys = (
        [(x.stages, sent.peer, sent.rows.count) for x in each for sent in x.sent]
        for each in shipments
    )
    foreign_queries, foreign_keys = (
        [(x.stages, *y) for x in each for y in zip(x.block.ranks, x.block.counts, strict=True)]
        for each in shipments
    )
    element, exact = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
    of_keys = s.batch * s.kv_heads * (s.dim + s.value_dim)
    statistics = (2 + call.return_lse) * exact
    moved = s.value_dim * element if kept else (s.dim + s.value_dim) * element
    # For each kind of message: its rows, and the bytes of a row. Results and gradients of foreign
    # rows return to their owners.
    sizes = {
        "forward": [
            (queries, s.batch * s.heads * s.dim * element),
            (keys, of_keys * element),
            (foreign_queries, s.batch * s.heads * (s.value_dim + 1) * exact),
        ],
        "backward": [
            (queries, s.batch * s.heads * moved),
            (queries, s.batch * s.heads * statistics),
            (keys, 0 if kept else of_keys * element),
            (foreign_queries, s.batch * s.heads * s.dim * exact),
            (foreign_keys, of_keys * exact),
        ],
    }
    for counts, size in sizes[direction]:
        for stages, peer, row_count in counts:
            step = stages.last if counts is foreign_keys else stages.first
            yield Traffic(direction, step, peer, groups, row_count * size)


Plans = Callable[[Geometry, Geometry, Mask], TaskRectangles]


class Planner:
    """The tasks that a user has given, or a user's function that makes tasks, with a name.

    A task is attention of some queries over some keys of one document. The name must be the same on
    all ranks. Planners with the same name are the same object.
    """

    def __init__(self, name: str, plan: TaskRectangles | Plans) -> None:
        self._name, self._plan = name, plan

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[object, ...]:
        return Planner.of, ("plan", self._plan)

    @classmethod
    def of(cls, option: str, plan: TaskRectangles | Plans | Planner) -> Planner:
        """Return the planner for the value of the option `option`.

        Raise a ValueError that names the option if the value is neither tasks nor a function.
        """
        if isinstance(plan, Planner):
            return plan
        if isinstance(plan, TaskRectangles):
            plan = as_tasks(option, plan)
            name = f"Tasks({digest_of(plan)})"
            return _planners.setdefault(name, cls(name, plan))
        if not callable(plan):
            raise ValueError(f"{option} must be None, Tasks, or a function, got {shown(plan)}")
        kind = plan if hasattr(plan, "__qualname__") else type(plan)
        name = f"{kind.__module__}.{kind.__qualname__}"
        # Functions can have the same name. They are numbered in the order in which they are first
        # used.
        for number in count(1):
            planner = _planners.setdefault(f"{name}#{number}", cls(f"{name}#{number}", plan))
            if _same(planner._plan, plan):
                return planner
        raise AssertionError

    def tasks(self, option: str, queries: Geometry, keys: Geometry, mask: Mask) -> TaskRectangles:
        """Return the tasks of a batch.

        Raise a ValueError that names the option if a (query, key) pair that the mask allows is in
        no task or in several tasks.
        """
        tasks = self._plan
        if not isinstance(tasks, TaskRectangles):
            tasks = as_tasks(option, tasks(queries, keys, mask))
        check_tasks(option, tasks, queries, keys, mask)
        return tasks


def _same(plan: object, other: object) -> bool:
    try:
        return bool(plan == other)
    except Exception:  # for example, because the objects compare arrays
        return plan is other


_planners: weakref.WeakValueDictionary[str, Planner] = weakref.WeakValueDictionary()
