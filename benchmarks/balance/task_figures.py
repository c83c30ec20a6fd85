"""The work and the bytes of attention tasks on servers."""

from __future__ import annotations

import numpy as np

from seqpar.balance import RowBytes
from seqpar.balance.disaggregation.cells import Unions
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import UNLIMITED
from seqpar.layout.tasks.tasks import Parts, TaskRectangles


def as_parts(tasks: TaskRectangles) -> Parts:
    """Return tasks under a causal mask, as objects that count their pairs."""
    nothing = np.zeros_like(tasks.documents)
    return Parts(*tasks[:5], nothing - UNLIMITED, nothing, tasks.servers)


def loads(tasks: TaskRectangles, servers: int) -> Floats:
    """Return (servers,) the pairs of each server under a causal mask."""
    pairs = as_parts(tasks).areas().astype(np.float64)
    return np.bincount(tasks.servers, pairs, servers).astype(np.float64)


def travelling(tasks: TaskRectangles, layout: Layout) -> tuple[Ints, Ints]:
    """Return (servers,) the rows of queries and of keys that travel to each server, once each."""
    home, found = layout.geometry.all_spans(), []
    columns = tasks.q_starts, tasks.q_stops, tasks.k_starts, tasks.k_stops
    for starts, stops in (columns[:2], columns[2:]):
        needed = tasks.servers, tasks.documents, starts, stops
        both = (np.concatenate(pair) for pair in zip(home, needed, strict=True))
        found.append(Unions(*both).sizes(layout.ranks) - Unions(*home).sizes(layout.ranks))
    return found[0], found[1]


def received(tasks: TaskRectangles, layout: Layout, row_bytes: RowBytes) -> Floats:
    """Return (servers,) the bytes that travel to each server, with the results that return."""
    queries, keys = travelling(tasks, layout)
    return queries * row_bytes.query + keys * row_bytes.key


def bound(load: Floats, tolerance: float, row_bytes: RowBytes) -> float:
    """Return a lower bound of the bytes of all servers, if each owns this work.

    The servers with the least work are filled up to the limit, since a larger part is cheaper. Each
    gets its deficit in one rectangle of the cheapest shape, even if no document has such a
    rectangle.
    """
    limit = (1 + tolerance) * load.mean()
    room = np.sort(np.maximum(limit - load, 0.0))[::-1]
    before = np.r_[0.0, np.cumsum(room)[:-1]]
    moved = np.clip(np.maximum(load - limit, 0.0).sum() - before, 0.0, room)
    return float((2 * np.sqrt(moved * row_bytes.query * row_bytes.key)).sum())
