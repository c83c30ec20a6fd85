"""Grid: the measured seconds of softmax attention, and what lies between the measurements.

A *task* is query rows × key rows of which some pairs see each other: a slice of a mask, or a span
of a document with the keys that it sees. A device's time for one depends on how many query rows
there are and how many keys each sees on average, and between measured points it is nearly bilinear
in both: a call, so much a row, so much a pair. DistCA's profiler does the same over (L_q, L_kv).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.core.arguments import Ints, as_int

Floats = NDArray[np.float64]
TABLES = ("forward", "backward", "window_forward", "window_backward")


def as_amounts(name: str, values: ArrayLike) -> Floats:
    """Return amounts as floats; raise a ValueError that names them if any is negative or NaN."""
    array = np.asarray(values, np.float64)
    if not (array >= 0).all():
        found = array.ravel()[np.argmin(array.ravel() >= 0)]
        raise ValueError(f"{name} must be at least 0, got {found}")
    return array


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks as arrays of one shape, here called (n,): each is one slice of attention.

    Attributes:
        rows: query rows.
        keys: key rows that any of them sees.
        pairs: (query, key) pairs that see each other, at most rows · keys.
        windowed: the fraction of pairs that are of rows whose window leaves keys out on the left:
            0 without a window, 1 far from the start of a document, something between near it.
    """

    rows: Floats
    keys: Floats
    pairs: Floats
    windowed: Floats

    @classmethod
    def of(
        cls, rows: ArrayLike, keys: ArrayLike, pairs: ArrayLike, windowed: ArrayLike = 0.0
    ) -> Tasks:
        """Make tasks from numbers or arrays, which are broadcast to one shape."""
        arrays = (np.asarray(x, np.float64) for x in (rows, keys, pairs, windowed))
        q, k, p, fraction = np.broadcast_arrays(*arrays)
        for name, x in (("rows", q), ("keys", k), ("pairs", p)):
            as_amounts(name, x)
        if (p > q * k).any():
            raise ValueError("pairs must be at most rows · keys")
        if not ((fraction >= 0) & (fraction <= 1)).all():
            raise ValueError("windowed must be fractions between 0 and 1")
        return cls(q, k, p, fraction)

    @property
    def cut_rows(self) -> Floats:
        """How many rows do not see all keys, where each row sees one key more than the last."""
        unseen = self.rows * self.keys - self.pairs
        cut = np.minimum((1 + np.sqrt(1 + 8 * unseen)) / 2, self.rows)
        return np.where(unseen > 0, cut, 0.0)


@dataclass(frozen=True, eq=False)
class Grid:
    """Seconds of calls of softmax attention, over query rows and the keys that a row sees.

    Between the nodes a time is bilinear in both. Beyond the last node of either it grows in
    proportion: the device is saturated, and does as many pairs a second as at that node. Below the
    first one it does not fall: such calls are as long.

    Attributes:
        rows, keys: (n,) and (m,), the nodes: query rows of a call, and keys that each sees.
        forward, backward: (n, m) seconds of a call in which every row sees all keys.
        window_forward, window_backward: (n, m) seconds of a call with a causal window, in which a
            row sees so many keys on average.
        heads, head_dim: what was measured; other heads cost in proportion.
        call: (2,) seconds of a forward and a backward that has nothing to compute; several tasks
            of one call have it once.
        edge: keys that each row of a causal task's cut tiles costs beyond those that it sees.
        tile: query rows which a kernel computes together: a task has a multiple of them.
        fused: whether a call computes all of its tasks together, as kernels on GPUs do. Then a
            task that would leave most of the device idle alone costs less among others.
    """

    rows: Floats
    keys: Floats
    forward: Floats
    backward: Floats
    window_forward: Floats
    window_backward: Floats
    heads: int
    head_dim: int
    call: tuple[float, float]
    edge: float
    tile: int
    fused: bool

    def __post_init__(self) -> None:
        for name in ("rows", "keys", *TABLES):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        object.__setattr__(self, "call", tuple(self.call))
        shape = (self.rows.size, self.keys.size)
        for name in ("rows", "keys"):
            nodes = getattr(self, name)
            if nodes.ndim != 1 or nodes.size < 2 or nodes[0] <= 0 or (np.diff(nodes) <= 0).any():
                raise ValueError(f"{name} must be 2 or more ascending positive numbers")
        for name in TABLES:
            table = getattr(self, name)
            if table.shape != shape or not (table > 0).all():
                raise ValueError(f"{name} must be {shape} positive seconds")
        for name in ("heads", "head_dim", "tile"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if len(self.call) != 2 or min(*self.call, self.edge) < 0:
            raise ValueError("call must be two numbers, and none of it or edge negative")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.rows.tobytes(), self.keys.tobytes(), self.forward.tobytes()))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers and lists, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()} | {
            "call": list(self.call)
        }

    def alone(self, tasks: Tasks, heads: int, head_dim: int, backward: bool = False) -> Floats:
        """Return (n,) seconds of each task in a call of its own; 0 for one without pairs."""
        rows, scale = self._scaled(tasks, heads, head_dim)
        call = self.call[backward]
        found = call + (self._look_up(tasks, rows, backward) - call) * scale
        return np.where(tasks.pairs > 0, found, 0.0)

    def work(self, tasks: Tasks, heads: int, head_dim: int, backward: bool = False) -> Floats:
        """Return (n,) seconds that each task adds to a call that has others too.

        Where tasks are fused it is what its rows take on a device that is saturated.
        """
        call = self.call[backward]
        if not self.fused:
            return np.maximum(self.alone(tasks, heads, head_dim, backward) - call, 0.0)
        rows, scale = self._scaled(tasks, heads, head_dim)
        many = np.full_like(rows, self.rows[-1])
        each = (self._look_up(tasks, many, backward) - call) * scale / many
        return np.where(tasks.pairs > 0, each * rows, 0.0)

    def together(
        self,
        tasks: Tasks,
        heads: int,
        head_dim: int,
        backward: bool = False,
        owner: ArrayLike | None = None,
        owners: int = 1,
    ) -> Floats:
        """Return (owners,) seconds of one call with all tasks of each owner, in order of owners.

        `owner` is (n,), whose call each task is in; by default there is one. A call takes as long
        as all of its tasks' work, and no less than any of them alone.
        """
        index = owners_of(owner, tasks.rows, owners)
        work = self.work(tasks, heads, head_dim, backward).ravel()
        called = np.bincount(index, tasks.pairs.ravel(), owners) > 0
        found = np.where(called, self.call[backward] + np.bincount(index, work, owners), 0.0)
        if self.fused:  # else their sum is never less
            np.maximum.at(found, index, self.alone(tasks, heads, head_dim, backward).ravel())
        return found

    def _scaled(self, tasks: Tasks, heads: int, head_dim: int) -> tuple[Floats, float]:
        """Return tasks' rows as the kernel has them, and a factor of their time.

        Fused kernels spread rows × heads over the device, so fewer heads are like fewer rows.
        """
        rows, scale = np.ceil(tasks.rows / self.tile) * self.tile, head_dim / self.head_dim
        if self.fused:
            return rows * (heads / self.heads), scale
        return rows, scale * heads / self.heads

    def _look_up(self, tasks: Tasks, rows: Floats, backward: bool) -> Floats:
        """Return the tables' seconds of tasks as if they had so many rows, that see as much."""
        way = "backward" if backward else "forward"
        extra = np.minimum(self.edge * tasks.cut_rows, tasks.rows * tasks.keys - tasks.pairs)
        many = np.maximum(tasks.rows, 1.0)
        seen = (tasks.pairs + extra) / many
        found = bilinear(self.rows, self.keys, getattr(self, way), rows, seen)
        if not tasks.windowed.any():
            return found
        table = getattr(self, f"window_{way}")
        windowed = bilinear(self.rows, self.keys, table, rows, tasks.pairs / many)
        return found + (windowed - found) * tasks.windowed


def owners_of(owner: ArrayLike | None, like: Floats, owners: int) -> Ints:
    """Return whose each item is, as integers below `owners`; by default all are the first's."""
    as_int("owners", owners, 1)
    if owner is None:
        return np.zeros(like.size, np.int64)
    index = np.asarray(owner, None if np.size(owner) else np.int64)
    numbers = index.shape == like.shape and index.dtype.kind in "iu"
    if not numbers or (index.size and not 0 <= index.min() <= index.max() < owners):
        raise ValueError(f"owner must have {like.shape} integers of 0 to {owners - 1}")
    return index.ravel().astype(np.int64)


def bilinear(x_nodes: Floats, y_nodes: Floats, table: Floats, x: Floats, y: Floats) -> Floats:
    """Return a table's values at points (x, y), each an array of one shape.

    Between nodes they are bilinear. Beyond the last node they grow in proportion to x or y, and
    below the first one they are those of that node.
    """
    x_in, y_in = (np.clip(v, nodes[0], nodes[-1]) for v, nodes in ((x, x_nodes), (y, y_nodes)))
    (i, u), (j, v) = _cell(x_nodes, x_in), _cell(y_nodes, y_in)
    low = table[i, j] * (1 - v) + table[i, j + 1] * v
    high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
    beyond = np.maximum(x / x_nodes[-1], 1.0) * np.maximum(y / y_nodes[-1], 1.0)
    return (low * (1 - u) + high * u) * beyond


def _cell(nodes: Floats, x: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return the index of the node before each x, and how far x is on the way to the next one."""
    i = np.minimum(np.searchsorted(nodes, x, side="right") - 1, nodes.size - 2)
    return i, (x - nodes[i]) / (nodes[i + 1] - nodes[i])
