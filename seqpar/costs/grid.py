"""Grid: measured seconds of softmax attention, with interpolation between the measurements.

A *task* is a number of query rows with the keys to which they attend, such as a span of a document
and all keys before the end of the span. The time of a task depends on the number of its query rows
and on the average number of keys per row. Between measured points, the time is nearly bilinear in
these two numbers, as in DistCA's profiler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.core.arguments import Ints, as_bool, as_float, as_int, shown
from seqpar.layout.masks.mask import Slices

Floats = NDArray[np.float64]
TABLES = ("forward", "backward", "window_forward", "window_backward")


def as_amounts(name: str, values: ArrayLike) -> Floats:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = np.asarray("")
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers, got {shown(values)}")
    array = found.astype(np.float64)
    if not (array >= 0).all():
        wrong = array.ravel()[np.argmin(array.ravel() >= 0)]
        raise ValueError(f"{name} must be at least 0, got {wrong}")
    return array


@dataclass(frozen=True, eq=False)
class Tasks:
    """The sizes of n tasks of softmax attention. All arrays have the same shape (n,).

    A task is a number of query rows with the keys to which they attend.

    Attributes:
        rows: (n,). The number of query rows.
        keys: (n,). The number of key rows to which at least one query row attends.
        pairs: (n,). The number of visible (query, key) pairs, which is at most rows · keys.
        windowed: (n,). The fraction of a task's pairs whose query does not attend to the first keys
            of the document, because a window excludes these keys. The fraction is 0 without a
            window. With a window, it is below 1 only if the task contains queries near the start of
            a document.
    """

    rows: Floats
    keys: Floats
    pairs: Floats
    windowed: Floats

    @classmethod
    def of(
        cls, rows: ArrayLike, keys: ArrayLike, pairs: ArrayLike, windowed: ArrayLike = 0.0
    ) -> Tasks:
        """Create tasks from numbers or arrays, which are broadcast to the same shape."""
        named = {"rows": rows, "keys": keys, "pairs": pairs, "windowed": windowed}
        arrays = [as_amounts(name, values) for name, values in named.items()]
        try:
            q, k, p, fraction = np.broadcast_arrays(*arrays)
        except ValueError:
            shapes = ", ".join(str(x.shape) for x in arrays)
            expected = "arrays that broadcast to one shape"
            raise ValueError(f"{', '.join(named)} must be {expected}, got {shapes}") from None
        if (p > q * k).any():
            raise ValueError("pairs must be at most rows · keys, the pairs of the whole rectangle")
        if not ((fraction >= 0) & (fraction <= 1)).all():
            raise ValueError("windowed must be fractions between 0 and 1")
        return cls(q, k, p, fraction)

    @property
    def cut_rows(self) -> Floats:
        """For each task, the number of query rows that attend to only some of the task's keys.

        Tasks are assumed to be causal: each row attends to one more key than the row before it.
        """
        unseen = self.rows * self.keys - self.pairs
        cut = np.minimum((1 + np.sqrt(1 + 8 * unseen)) / 2, self.rows)
        return np.where(unseen > 0, cut, 0.0)


def causal_pairs(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Floats:
    """Return the number of (query, key) pairs that a causal mask allows for the queries start …
    stop − 1 of a document. With `window`, a query attends to at most `window` keys.
    """
    starts, stops = as_amounts("starts", starts), as_amounts("stops", stops)
    if (stops < starts).any():
        raise ValueError("stops must be at least starts, the first positions of the spans")

    def before(position: Floats) -> Floats:
        if window is None:
            return position * (position + 1) / 2
        growing = np.minimum(position, window)  # rows whose window begins before the document
        return growing * (growing + 1) / 2 + (position - growing) * window

    return before(stops) - before(starts)


def span_tasks(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Tasks:
    """Return spans of documents as tasks, each with all keys to which the span attends."""
    starts, stops = (np.asarray(x, np.float64) for x in (starts, stops))
    pairs, rows = causal_pairs(starts, stops, window), stops - starts
    if window is None:
        return Tasks.of(rows, stops, pairs)
    keys = np.where(rows > 0, np.minimum(stops, rows + window - 1), 0.0)
    # The window excludes keys only in rows whose position is at least `window`.
    windowed = causal_pairs(np.maximum(starts, window), np.maximum(stops, window), window)
    return Tasks.of(rows, keys, pairs, windowed / np.maximum(pairs, 1.0))


def slice_tasks(slices: Slices) -> Tasks:
    """Return the slices of a mask (`seqpar.layout.masks.mask`) as tasks."""
    pairs = [visible for visible, _ in slices.pairs]
    windowed = [part / max(1, visible) for visible, part in slices.pairs]
    rows, keys = (np.diff(x, axis=1)[:, 0] for x in (slices.q_rows, slices.k_rows))
    return Tasks.of(rows, keys, pairs, windowed)


@dataclass(frozen=True, eq=False)
class Grid:
    """A table of the measured seconds of softmax attention, for calls of different sizes.

    The size of a call is two numbers: its number of query rows, and the average number of keys per
    row. Between measured sizes, the seconds are interpolated linearly in both numbers. If a number
    is above its largest measured value, the seconds are proportional to this number. If a number is
    below its smallest measured value, the seconds are those of the smallest measured value.
    """

    rows: Floats  # (n,) the measured numbers of query rows of a call
    keys: Floats  # (m,) the measured numbers of keys per row
    forward: Floats  # (n, m) seconds if every row attends to all keys
    backward: Floats
    window_forward: Floats  # (n, m) seconds with a causal window; `keys` is the average per row
    window_backward: Floats
    heads: int  # query heads of the measured calls
    head_dim: int
    call: tuple[float, float]  # constant seconds of a call: (forward, backward)
    edge: float  # additional keys per row of a causal task, for the cost of cut tiles
    # Query rows that a kernel computes together; a task's rows are rounded up to a multiple.
    tile: int
    fused: bool  # whether a call computes all of its tasks together, as GPU kernels do

    def __post_init__(self) -> None:
        for name in ("rows", "keys", *TABLES):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        object.__setattr__(self, "call", tuple(self.call))
        shape = (self.rows.size, self.keys.size)
        for name in ("rows", "keys"):
            nodes = getattr(self, name)
            # Comparisons with NaN are false.
            ascend = nodes.ndim == 1 and nodes.size >= 2 and (np.diff(nodes) > 0).all()
            if not ascend or nodes[0] <= 0 or nodes[-1] == np.inf:
                raise ValueError(f"{name} must be 2 or more ascending positive finite numbers")
        for name in TABLES:
            table = getattr(self, name)
            if table.shape != shape or not ((table > 0) & (table < np.inf)).all():
                raise ValueError(f"{name} must be {shape} positive finite seconds")
        for name in ("heads", "head_dim", "tile"):
            as_int(name, getattr(self, name), 1)
        as_bool("fused", self.fused)
        if len(self.call) != 2:
            raise ValueError(f"call must be (forward, backward), got {self.call!r}")
        for name, value in (("call", self.call[0]), ("call", self.call[1]), ("edge", self.edge)):
            if not 0 <= as_float(name, value) < np.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.rows.tobytes(), self.keys.tobytes(), self.forward.tobytes()))

    def as_dict(self) -> dict[str, object]:
        return {x.name: np.asarray(getattr(self, x.name)).tolist() for x in fields(self)}

    def alone(self, tasks: Tasks, heads: int, head_dim: int, backward: bool = False) -> Floats:
        """Return the seconds (n,) of each task if each task is a separate call. A task without
        pairs takes 0 s.
        """
        rows, scale = self._scaled(tasks, heads, head_dim)
        call = self.call[backward]
        seconds = call + (self._look_up(tasks, rows, backward) - call) * scale
        return np.where(tasks.pairs > 0, seconds, 0.0)

    def work(self, tasks: Tasks, heads: int, head_dim: int, backward: bool = False) -> Floats:
        """Return the seconds (n,) that each task adds to a call of several tasks.

        If the grid is `fused`, the call is assumed to have enough tasks to use the whole device.
        """
        call = self.call[backward]
        if not self.fused:
            return np.maximum(self.alone(tasks, heads, head_dim, backward) - call, 0.0)
        rows, scale = self._scaled(tasks, heads, head_dim)
        saturating = np.full_like(rows, self.rows[-1])
        per_row = (self._look_up(tasks, saturating, backward) - call) * scale / saturating
        return np.where(tasks.pairs > 0, per_row * rows, 0.0)

    def together(
        self,
        tasks: Tasks,
        heads: int,
        head_dim: int,
        backward: bool = False,
        owner: ArrayLike | None = None,
        owners: int = 1,
    ) -> Floats:
        """Return (owners,): for each owner, the seconds of one call that computes all tasks of the
        owner.

        A task is a number of query rows with the keys to which they attend. An owner is, for
        example, a rank. `owner` (n,) is the index of each task's owner. By default, all tasks have
        the same owner. The time of a call is the sum of the work of its tasks, but at least the
        time of its longest task in a separate call.
        """
        index = owners_of(owner, tasks.rows, owners)
        work = self.work(tasks, heads, head_dim, backward).ravel()
        is_called = np.bincount(index, tasks.pairs.ravel(), owners) > 0
        seconds = np.where(is_called, self.call[backward] + np.bincount(index, work, owners), 0.0)
        if self.fused:  # otherwise the sum is never below the longest task
            np.maximum.at(seconds, index, self.alone(tasks, heads, head_dim, backward).ravel())
        return seconds

    def _scaled(self, tasks: Tasks, heads: int, head_dim: int) -> tuple[Floats, float]:
        """Return the numbers of rows (n,) with which tasks are looked up in the grid, and the
        factor by which the seconds from the grid are multiplied.

        Rows are rounded up to a multiple of `tile`, the number of rows that a kernel computes
        together. The factor corrects for the head dim. If `fused` is True, the kernel divides heads
        and rows among multiprocessors, so a task with fewer heads than the measured calls is looked
        up with fewer rows. If `fused` is False, the factor also corrects for the number of heads.
        """
        rows = np.ceil(tasks.rows / self.tile) * self.tile
        scale = head_dim / self.head_dim
        # The kernel divides rows × heads among multiprocessors, so fewer heads are like fewer rows.
        if self.fused:
            return rows * (heads / self.heads), scale
        return rows, scale * heads / self.heads

    def _look_up(self, tasks: Tasks, rows: Floats, backward: bool) -> Floats:
        name = "backward" if backward else "forward"
        extra = np.minimum(self.edge * tasks.cut_rows, tasks.rows * tasks.keys - tasks.pairs)
        task_rows = np.maximum(tasks.rows, 1.0)
        keys_per_row = (tasks.pairs + extra) / task_rows
        causal = bilinear(self.rows, self.keys, getattr(self, name), rows, keys_per_row)
        if not tasks.windowed.any():
            return causal
        table = getattr(self, f"window_{name}")
        windowed = bilinear(self.rows, self.keys, table, rows, tasks.pairs / task_rows)
        return causal + (windowed - causal) * tasks.windowed


def owners_of(owner: ArrayLike | None, like: Floats, owners: int) -> Ints:
    as_int("owners", owners, 1)
    if owner is None:
        return np.zeros(like.size, np.int64)
    index = np.asarray(owner, None if np.size(owner) else np.int64)
    are_integers = index.shape == like.shape and index.dtype.kind in "iu"
    if not are_integers or (index.size and not 0 <= index.min() <= index.max() < owners):
        raise ValueError(f"owner must have {like.shape} integers of 0 to {owners - 1}")
    return index.ravel().astype(np.int64)


def bilinear(x_nodes: Floats, y_nodes: Floats, table: Floats, x: Floats, y: Floats) -> Floats:
    """Interpolate a table at points (x, y). `x_nodes` and `y_nodes` are the coordinates of the
    table's rows and columns, in ascending order.

    If x or y is below the first coordinate, the value is the value at the first coordinate. If x or
    y is above the last coordinate, the value is proportional to it.
    """
    x_in, y_in = (np.clip(v, nodes[0], nodes[-1]) for v, nodes in ((x, x_nodes), (y, y_nodes)))
    (i, u), (j, v) = _cell(x_nodes, x_in), _cell(y_nodes, y_in)
    low = table[i, j] * (1 - v) + table[i, j + 1] * v
    high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
    beyond = np.maximum(x / x_nodes[-1], 1.0) * np.maximum(y / y_nodes[-1], 1.0)
    return (low * (1 - u) + high * u) * beyond


def _cell(nodes: Floats, x: Floats) -> tuple[NDArray[np.intp], Floats]:
    i = np.minimum(np.searchsorted(nodes, x, side="right") - 1, nodes.size - 2)
    return i, (x - nodes[i]) / (nodes[i + 1] - nodes[i])
