"""Tasks, which are rectangles of query positions and key positions that any rank may compute.

To compute attention under a mask, a *task* is cut into one or more *parts*. A part is a rectangle
with one *band*, a range of allowed distances between the positions of a key and a query.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints, RowIndex, listed, shown
from seqpar.core.ranges import UNLIMITED, enumerated, mix, overlapping, ranges
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.masks.mask_ranges import Ranges
from seqpar.layout.masks.slices_of_band import trim


class TaskRectangles(NamedTuple):
    """Tasks: rectangles of query and key positions, and the rank that computes each, as arrays
    (n,).

    A task is attention for the visible (query, key) pairs in its rectangle. If the task has a band,
    it is attention only for the pairs in this band. Every visible pair must be in exactly one task.
    Hidden pairs may be in any number of tasks. Positions of queries are counted among the
    document's queries, and positions of keys among the document's keys.

    Attributes:
        documents: the document of the queries and keys.
        q_starts, q_stops: the range of queries.
        k_starts, k_stops: the range of keys.
        servers: the rank that computes the task.
        lows, highs: a band low ≤ k_pos − q_pos ≤ high. Both are None if no task has a band. Several
            tasks may have the same rectangle with different bands.
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
        """The lower and upper bounds of the bands, which are unlimited for tasks without a band."""
        unlimited = np.full_like(self.servers, UNLIMITED)
        lows = -unlimited if self.lows is None else self.lows
        return lows, unlimited if self.highs is None else self.highs

    def take(self, chosen: RowIndex) -> TaskRectangles:
        lows = None if self.lows is None else self.lows[chosen]
        highs = None if self.highs is None else self.highs[chosen]
        others = TaskRectangles(*(column[chosen] for column in self[:6]))
        return others._replace(lows=lows, highs=highs)


def as_tasks(name: str, value: object) -> TaskRectangles:
    if not isinstance(value, TaskRectangles):
        raise ValueError(f"{name} must be TaskRectangles, got {shown(value)}")
    columns = []
    for field, column in zip(TaskRectangles._fields, (*value[:6], *value.bands), strict=True):
        found = np.asarray(column)
        if found.dtype.kind not in "iu" or found.ndim != 1 or found.size != len(value.documents):
            expected = f"one integer a task in {field}"
            raise ValueError(f"{name} must have {expected}, got {found.shape} of {found.dtype}")
        columns.append(found.astype(np.int64))
        columns[-1].setflags(write=False)
    return TaskRectangles(*columns)


def check_rectangles(name: str, tasks: TaskRectangles, queries: Geometry, keys: Geometry) -> None:
    def check(field: str, least: Ints | int, most: Ints | int) -> None:
        column: Ints = getattr(tasks, field)
        wrong = np.flatnonzero((column < least) | (column > most))
        if wrong.size:
            i = int(wrong[0])
            low, high = (int(np.broadcast_to(x, column.shape)[i]) for x in (least, most))
            limit = f"{field}[{i}] from {low} to {high}"
            raise ValueError(f"{name} must have {limit}, got {column[i]}")

    check("documents", 0, queries.lengths.size - 1)
    check("servers", 0, queries.ranks - 1)
    check("q_starts", 0, tasks.q_stops)
    check("q_stops", tasks.q_starts, queries.lengths[tasks.documents])
    check("k_starts", 0, tasks.k_stops)
    check("k_stops", tasks.k_starts, keys.lengths[tasks.documents])


def described(tasks: TaskRectangles, ranks: int) -> dict[str, str]:
    """Return tasks as texts, for errors that show how the plans of ranks differ."""
    of_ranks = np.bincount(tasks.servers, minlength=ranks).tolist()
    return {
        "tasks": f"{len(tasks.documents)} tasks",
        "ranks": f"{listed(of_ranks)} tasks on {ranks} ranks",
        "digest": f"tasks with the digest {digest_of(tasks)}",
    }


def digest_of(tasks: TaskRectangles) -> str:
    """Return 16 hexadecimal digits, which are the same for equal tasks."""
    content = np.concatenate([[len(tasks.documents)], *tasks[:6], *tasks.bands]).astype("<i8")
    return hashlib.sha256(content.tobytes()).hexdigest()[:16]


class Parts(NamedTuple):
    """Parts of tasks: rectangles of query and key positions with one band each, as arrays (n,).

    A *band* low ≤ k_pos − q_pos ≤ high says which queries of the rectangle attend to which keys.
    Positions of queries are counted from the document's first query, and positions of keys from the
    document's first key. Each rectangle is as small as its pairs allow.
    """

    documents: Ints  # the document of the queries and keys
    q_starts: Ints  # the range of queries
    q_stops: Ints
    k_starts: Ints  # the range of keys
    k_stops: Ints
    lows: Ints  # the band lo ≤ k_pos − q_pos ≤ hi
    highs: Ints
    servers: Ints  # the rank that computes the part

    @classmethod
    def of(cls, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask) -> Parts:
        """Cut each task into parts. A part is a rectangle of positions with a range of allowed
        distances.

        A task has one part for the keys in the prefix of the mask, and one part for the keys behind
        the prefix. For a mask with ranges, a task has one part for each range that overlaps the
        task.
        """
        if mask.ranges is not None:
            return cls._of_ranges(tasks, mask.ranges.columns)
        shifts = (keys.lengths - queries.lengths)[tasks.documents]
        q, k = (tasks.q_starts, tasks.q_stops), (tasks.k_starts, tasks.k_stops)
        lows, highs = tasks.bands
        bands = np.maximum(lows, shifts - mask.left), np.minimum(highs, shifts + mask.right)
        if mask.prefix is None:
            return cls(tasks.documents, *q, *k, *bands, tasks.servers).trimmed()
        prefix = np.array(mask.prefix, dtype=np.int64)[tasks.documents]
        behind, before = np.maximum(k[0], prefix), np.minimum(k[1], prefix)
        of_band = cls(tasks.documents, *q, behind, k[1], *bands, tasks.servers)
        of_prefix = cls(tasks.documents, *q, k[0], before, lows, highs, tasks.servers)
        return cls(*map(np.concatenate, zip(of_band, of_prefix, strict=True))).trimmed()

    @classmethod
    def _of_ranges(cls, tasks: TaskRectangles, ranges: Ranges) -> Parts:
        of_task, of_range = overlapping(tasks[:3], ranges[:3])
        tasks, ranges = tasks.take(of_task), ranges.take(of_range)
        lows, highs = tasks.bands
        return cls(
            documents=tasks.documents,
            q_starts=np.maximum(tasks.q_starts, ranges.q_starts),
            q_stops=np.minimum(tasks.q_stops, ranges.q_stops),
            k_starts=np.maximum(tasks.k_starts, ranges.k_starts),
            k_stops=np.minimum(tasks.k_stops, ranges.k_stops),
            lows=np.maximum(lows, ranges.lows),
            highs=np.minimum(highs, ranges.highs),
            servers=tasks.servers,
        ).trimmed()

    def trimmed(self) -> Parts:
        kept, edges = trim(*self[1:7])
        return Parts(self.documents[kept], *edges, *(x[kept] for x in self[5:]))

    def take(self, chosen: RowIndex) -> Parts:
        return Parts(*(column[chosen] for column in self))

    def areas(self) -> Ints:
        return self._below(self.highs) - self._below(self.lows - 1)

    def _below(self, bounds: Ints) -> Ints:
        """Return the number of (query, key) pairs of each part with k_pos − q_pos ≤ bound.

        A part is a rectangle of query positions and key positions.
        """
        width = self.k_stops - self.k_starts
        c = np.clip(bounds + 1 - self.k_starts, -self.q_stops, width - self.q_starts)

        def before(x: Ints) -> Ints:
            growing = np.clip(x, 0, width)
            return growing * (growing - 1) // 2 + width * np.maximum(x - width, 0)

        return before(self.q_stops + c) - before(self.q_starts + c)

    def cut(self, starts: Ints, edges: Ints) -> tuple[Parts, Ints]:
        """Cut the queries of each part at the edges of the rank that computes the part.

        A part is a rectangle of query positions and key positions. `edges` (ranks, n + 1) are
        indices of the packed batch, in which document d begins at `starts[d]`. Returns the cut
        parts, and for each cut part the index of the interval between two edges that contains its
        queries.
        """
        own_edges = edges[self.servers] - starts[self.documents][:, None]
        index, q_starts, q_stops, between = cut_ranges(self.q_starts, self.q_stops, own_edges)
        pieces = self.take(index)._replace(q_starts=q_starts, q_stops=q_stops)
        return pieces.trimmed(), between


def cut_ranges(starts: Ints, stops: Ints, edges: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut ranges into pieces. Range i is cut at `edges[i]`; `edges` is (ranges, n + 1).

    Returns four arrays with an entry for each nonempty piece: the index of the range, the piece's
    start, the piece's stop, and the index of the interval between two edges that contains the
    piece.
    """
    first = (edges[:, 1:-1] <= starts[:, None]).sum(1)
    index, between = enumerated(first, (edges[:, 1:-1] < stops[:, None]).sum(1))
    starts = np.maximum(starts[index], edges[index, between])
    stops = np.minimum(stops[index], edges[index, between + 1])
    kept = stops > starts
    return index[kept], starts[kept], stops[kept], between[kept]


_ROWS_PER_CHECK = 2**22  # rows that are hashed at a time, which limits memory


def check_tasks(
    name: str, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask
) -> None:
    """Raise a ValueError that names the argument unless every visible pair is in exactly one task.

    The time of the check is linear in the number of the tasks' queries.
    """
    check_rectangles(name, tasks, queries, keys)
    documents = np.arange(queries.lengths.size)
    none = np.zeros_like(documents)
    whole = TaskRectangles(documents, none, queries.lengths, none, keys.lengths, none)
    # Each (query, key) pair has a hash: the product of a hash of the query and a hash of the key.
    # For each document, the sum over its tasks, modulo 2**64, is compared with the sum over its
    # visible pairs.
    found, expected = (_hashes(x, queries, keys, mask) for x in (tasks, whole))
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        i = int(wrong[0])
        actual = f"tasks of document {i} that have some pair twice, or not at all"
        wanted = "every pair that the mask shows in exactly one task"
        raise ValueError(f"{name} must have {wanted}, got {actual}")


def _hashes(
    tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask
) -> NDArray[np.uint64]:
    parts = Parts.of(tasks, queries, keys, mask)
    of_keys = np.zeros(keys.tokens + 1, np.uint64)
    np.cumsum(mix(np.arange(keys.tokens), 1), out=of_keys[1:])
    sums = np.zeros(queries.lengths.size, np.uint64)
    batches = np.cumsum(parts.q_stops - parts.q_starts) // _ROWS_PER_CHECK
    for batch in np.unique(batches):
        some = parts.take(batches == batch)
        position = ranges(some.q_starts, some.q_stops)
        part = np.repeat(np.arange(some.documents.size), some.q_stops - some.q_starts)
        start = np.maximum(some.k_starts[part], position + some.lows[part])
        stop = np.minimum(some.k_stops[part], position + some.highs[part] + 1)
        document = some.documents[part]
        first_key, query = keys.cu_seqlens[document], queries.cu_seqlens[document] + position
        of_seen = of_keys[first_key + stop] - of_keys[first_key + start]
        np.add.at(sums, document, mix(query, 0) * of_seen)
    return sums
