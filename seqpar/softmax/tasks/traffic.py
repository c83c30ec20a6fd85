"""Say what a rank sends for tasks, from geometry alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.layout.geometry import Geometry
from seqpar.layout.tasks.segments import Segments
from seqpar.layout.tasks.task_rows import Stages, TaskRows, arriving_at, sent_by
from seqpar.softmax.call import ResolvedCall

Counts = dict[tuple[Stages, int], int]  # (stages, peer): rows


def task_traffic(
    call: ResolvedCall, rows: TaskRows, direction: str, rank: int, kept: bool
) -> Iterator[Traffic]:
    """Yield what a rank sends in a pass. Of what servers `kept`, nothing travels in backward."""
    s = call.shape
    moving = (call.layout, rows.queries), (call.kv_layout, rows.keys)
    queries, keys = (_sent(rank, *each, rows.stages) for each in moving)
    guests, guest_keys = (_came(rank, *each, rows.stages) for each in moving)
    element, exact = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
    of_keys = s.batch * s.kv_heads * (s.dim + s.value_dim)
    statistics = (2 + call.return_lse) * exact
    moved = s.value_dim * element if kept else (s.dim + s.value_dim) * element
    # Of each pass, which rows a message is of, and the bytes of one of them.
    sizes = {
        "forward": [
            (queries, s.batch * s.heads * s.dim * element),
            (keys, of_keys * element),
            (guests, s.batch * s.heads * (s.value_dim + 1) * exact),
        ],
        "backward": [
            (queries, s.batch * s.heads * moved),
            (queries, s.batch * s.heads * statistics),
            (keys, 0 if kept else of_keys * element),
            (guests, s.batch * s.heads * s.dim * exact),
            (guest_keys, of_keys * exact),
        ],
    }
    for counts, size in sizes[direction]:
        for (stages, peer), count in counts.items():
            step = stages.last if counts is guest_keys else stages.first
            yield Traffic(direction, step, peer, 1, count * size)


def _sent(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Counts:
    """Return how many rows a rank sends to servers."""
    sent, counts = sent_by(rank, geometry, needed, stages), Counter[tuple[Stages, int]]()
    columns = sent.owns, sent.firsts, sent.lasts, sent.servers, sent.stops - sent.starts
    for *needing, server, count in zip(*(x.tolist() for x in columns), strict=True):
        counts[Stages(*needing), server] += count
    return counts


def _came(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Counts:
    """Return how many rows come to a rank, which is a server."""
    return {
        (label, peer): count
        for label, block in arriving_at(rank, geometry, needed, stages).items()
        for peer, count in zip(block.ranks, block.counts, strict=True)
    }
