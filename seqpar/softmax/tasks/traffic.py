"""Compute the messages that a rank sends for tasks, from geometry only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.layout.geometry import Geometry
from seqpar.layout.tasks.segments import Segments
from seqpar.layout.tasks.task_rows import Stages, TaskRows, arriving_at, sent_by
from seqpar.softmax.call import ResolvedCall

Counts = dict[tuple[Stages, int], int]  # (stages, peer) -> number of rows


def task_traffic(
    call: ResolvedCall, rows: TaskRows, direction: str, rank: int, kept: bool
) -> Iterator[Traffic]:
    """Yield the messages of a rank in a pass.

    `kept` is whether servers keep the rows that they receive in forward, so that these do not
    travel again in backward.
    """
    s = call.shape
    moving = (call.layout, rows.queries), (call.kv_layout, rows.keys)
    queries, keys = (_sent(rank, *each, rows.stages) for each in moving)
    foreign_queries, foreign_keys = (_received(rank, *each, rows.stages) for each in moving)
    element, exact = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
    of_keys = s.batch * s.kv_heads * (s.dim + s.value_dim)
    statistics = (2 + call.return_lse) * exact
    moved = s.value_dim * element if kept else (s.dim + s.value_dim) * element
    # For each kind of message, its rows and the bytes of a row. Results and gradients of foreign
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
        for (stages, peer), count in counts.items():
            step = stages.last if counts is foreign_keys else stages.first
            yield Traffic(direction, step, peer, 1, count * size)


def _sent(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Counts:
    """Return the number of rows that a rank sends to each server."""
    sent, counts = sent_by(rank, geometry, needed, stages), Counter[tuple[Stages, int]]()
    columns = sent.owns, sent.firsts, sent.lasts, sent.servers, sent.stops - sent.starts
    for *needing, server, count in zip(*(x.tolist() for x in columns), strict=True):
        counts[Stages(*needing), server] += count
    return counts


def _received(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Counts:
    """Return the number of rows that a rank receives from each peer, as a server."""
    return {
        (label, peer): count
        for label, block in arriving_at(rank, geometry, needed, stages).items()
        for peer, count in zip(block.ranks, block.counts, strict=True)
    }
