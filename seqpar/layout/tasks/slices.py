"""Compile parts of tasks to slices over a block of query rows and a block of key rows."""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up
from seqpar.layout.masks.band_intersection import cut_at_gaps, in_reach
from seqpar.layout.masks.mask import Slices
from seqpar.layout.tasks.parts import Parts
from seqpar.layout.tasks.task_rows import ServerRows


def task_slices(parts: Parts, queries: ServerRows, keys: ServerRows, shift: Ints) -> Slices:
    """Return the slices of the blocks' rows with visible pairs in these parts.

    There is one for each part, cluster of query rows and run of key rows with any visible pair.
    `shift` (documents,) aligns the ends of each document.
    """
    q, k = queries.holding, keys.holding
    part, q_runs = _runs_of(parts.documents, queries)
    q_start = q.rows_before(q_runs, parts.q_starts[part])
    q_stop = q.rows_before(q_runs, parts.q_stops[part])
    piece, q_start, q_stop = cut_at_gaps(q, q_start, q_stop, (parts.highs - parts.lows)[part])
    part, q_runs = part[piece], q_runs[piece]
    piece, k_runs = _runs_of(parts.documents[part], keys)
    part, q_runs, q_start, q_stop = (x[piece] for x in (part, q_runs, q_start, q_stop))
    bands = parts.lows[part], parts.highs[part]
    limits = parts.k_starts[part], parts.k_stops[part]
    table = in_reach(q, k, (q_runs, k_runs), (q_start, q_stop), bands, limits)
    table = table[:, np.argsort(table[2], kind="stable")]
    q_rows, k_rows, found = (np.stack([table[i], table[i + 1]], 1) for i in (0, 2, 4))
    none, aligned = np.empty((0, 2), np.int64), q.aligned(shift[queries.documents])
    return Slices(q_rows, k_rows, found, q.positions, k.positions, none, q_aligned=aligned)


def _runs_of(documents: Ints, block: ServerRows) -> tuple[Ints, Ints]:
    """Return all pairs of a document's index and a run of that document in the block."""
    runs = block.holding.runs.documents
    order = np.argsort(block.documents[runs], kind="stable")
    found = block.documents[runs][order]
    first = np.searchsorted(found, documents, side="left")
    counts = np.searchsorted(found, documents, side="right") - first
    index = np.repeat(np.arange(documents.size), counts)
    return index, runs[order[first[index] + count_up(counts)]]
