"""Attention as tasks, which any rank may compute."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints, RowIndex, shown
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.geometry import Geometry


class TaskRectangles(NamedTuple):
    """Rectangles of query and key positions, and the rank that computes each, as (n,) arrays.

    A task is the visible pairs in its rectangle, or only those in a band. Together tasks have every
    visible pair once; hidden pairs may be in several tasks or in none. Positions of queries count
    among a document's queries, and positions of keys among its keys (`kv_layout` may have more).

    Attributes:
        documents: the document of the queries and keys.
        q_starts, q_stops: the range of queries.
        k_starts, k_stops: the range of keys.
        servers: the rank that computes the task.
        lows, highs: a band low ≤ k_pos − q_pos ≤ high, or None for both if no task has one. If
            ranges of a mask share a rectangle, tasks may share it too.
    """

    documents: Ints
    q_starts: Ints
    q_stops: Ints
    k_starts: Ints
    k_stops: Ints
    servers: Ints
    lows: Ints | None = None
    highs: Ints | None = None

    @property
    def bands(self) -> tuple[Ints, Ints]:
        """The bounds of the bands; unlimited for tasks without bands."""
        unlimited = np.full_like(self.servers, UNLIMITED)
        lows = -unlimited if self.lows is None else self.lows
        return lows, unlimited if self.highs is None else self.highs

    def take(self, chosen: RowIndex) -> TaskRectangles:
        """Return the tasks that an index, or a boolean mask, chooses."""
        lows = None if self.lows is None else self.lows[chosen]
        highs = None if self.highs is None else self.highs[chosen]
        others = TaskRectangles(*(column[chosen] for column in self[:6]))
        return others._replace(lows=lows, highs=highs)


def as_tasks(name: str, value: object) -> TaskRectangles:
    if not isinstance(value, TaskRectangles):
        raise ValueError(f"{name} must be Tasks, got {shown(value)}")
    columns: list[Ints] = []
    for field, column in zip(TaskRectangles._fields, (*value[:6], *value.bands), strict=True):
        found: NDArray[np.generic] = np.asarray(column)
        if found.dtype.kind not in "iu" or found.ndim != 1 or found.size != len(value.documents):
            expected = f"one integer a task in {field}"
            raise ValueError(f"{name} must have {expected}, got {found.shape} of {found.dtype}")
        columns.append(found.astype(np.int64))
        columns[-1].setflags(write=False)
    return TaskRectangles(*columns)


def check_rectangles(name: str, tasks: TaskRectangles, queries: Geometry, keys: Geometry) -> None:
    limits: dict[str, tuple[Ints | int, Ints | int]] = {
        "documents": (0, queries.lengths.size - 1),
        "servers": (0, queries.ranks - 1),
    }
    _check_limits(name, tasks, limits)
    q_lengths, k_lengths = queries.lengths[tasks.documents], keys.lengths[tasks.documents]
    limits = {"q_starts": (0, tasks.q_stops), "q_stops": (tasks.q_starts, q_lengths)}
    limits |= {"k_starts": (0, tasks.k_stops), "k_stops": (tasks.k_starts, k_lengths)}
    _check_limits(name, tasks, limits)


def _check_limits(
    name: str, tasks: TaskRectangles, limits: dict[str, tuple[Ints | int, Ints | int]]
) -> None:
    for field, (least, most) in limits.items():
        column: Ints = getattr(tasks, field)
        wrong = np.flatnonzero((column < least) | (column > most))
        if wrong.size:
            i = int(wrong[0])
            low, high = (int(np.broadcast_to(x, column.shape)[i]) for x in (least, most))
            limit = f"{field}[{i}] from {low} to {high}"
            raise ValueError(f"{name} must have {limit}, got {column[i]}")


def digest_of(tasks: TaskRectangles) -> str:
    """Return 16 hexadecimal digits, the same for equal tasks."""
    content = np.concatenate([[len(tasks.documents)], *tasks[:6], *tasks.bands]).astype("<i8")
    return hashlib.sha256(content.tobytes()).hexdigest()[:16]
