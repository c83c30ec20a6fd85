"""What spans of documents cost under a causal mask, in closed form, and slices as tasks."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from seqpar.costs.grid import Floats, Tasks, as_amounts
from seqpar.layout.masks.mask import Slices


def causal_pairs(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Floats:
    """Return how many pairs the queries at positions start … stop − 1 of a document see.

    Each sees the keys up to its own position, and of these the last `window`, itself included.
    """
    starts, stops = as_amounts("starts", starts), as_amounts("stops", stops)
    if (stops < starts).any():
        raise ValueError("stops must not be before starts")

    def before(position: Floats) -> Floats:
        growing = position if window is None else np.minimum(position, window)
        rest = 0.0 if window is None else (position - growing) * window
        return growing * (growing + 1) / 2 + rest

    return before(stops) - before(starts)


def span_tasks(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Tasks:
    """Return the tasks of spans of documents with all the keys that they see, in one block."""
    starts, stops = (np.asarray(x, np.float64) for x in (starts, stops))
    pairs, rows = causal_pairs(starts, stops, window), stops - starts
    if window is None:
        return Tasks.of(rows, stops, pairs)
    keys = np.where(rows > 0, np.minimum(stops, rows + window - 1), 0.0)
    # of the rows from position `window` on; before it a window leaves no key out
    windowed = causal_pairs(np.maximum(starts, window), np.maximum(stops, window), window)
    return Tasks.of(rows, keys, pairs, windowed / np.maximum(pairs, 1.0))


def slice_tasks(slices: Slices) -> Tasks:
    """Return the tasks of slices, which layouts and masks make (`seqpar.layout.masks.mask`)."""
    pairs, windowed = [], []
    for i in range(len(slices)):
        start, stop = slices.key_intervals(i)
        pairs.append(int((stop - start).sum()))
        windowed.append(int((stop - start)[start > 0].sum()) / max(1, pairs[-1]))
    rows, keys = (np.diff(x, axis=1)[:, 0] for x in (slices.q_rows, slices.k_rows))
    return Tasks.of(rows, keys, pairs, windowed)
