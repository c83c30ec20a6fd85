"""Check that tasks together have every visible pair of a batch exactly once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqpar.core.ranges import mix, ranges
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.parts import Parts
from seqpar.layout.tasks.tasks import TaskRectangles, check_rectangles

_ROWS_PER_CHECK = 2**22  # bounds the memory of a check


def check_tasks(
    name: str, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask
) -> None:
    """Raise a ValueError that names the argument unless every visible pair is in exactly one task.

    Each (query, key) pair has a hash, the product of a query's and a key's hash. The sum over a
    document's tasks, modulo 2**64, is compared with the sum over its visible pairs, in time linear
    in the number of the tasks' queries.
    """
    check_rectangles(name, tasks, queries, keys)
    documents = np.arange(queries.lengths.size)
    none = np.zeros_like(documents)
    whole = TaskRectangles(documents, none, queries.lengths, none, keys.lengths, none)
    found, expected = (_hashes(x, queries, keys, mask) for x in (tasks, whole))
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        i = int(wrong[0])
        reason = f"those of document {i} have some pair twice, or not at all"
        raise ValueError(f"{name} must have every pair that the mask shows in one task: {reason}")


def _hashes(
    tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask
) -> NDArray[np.uint64]:
    """Return (documents,) the sum of the hashes of all visible pairs of the tasks."""
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
