"""Spans of documents under a causal mask, and slices of masks, as tasks."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from seqpar.costs.grid import Floats, Tasks, as_amounts
from seqpar.layout.masks.mask import Slices


def causal_pairs(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Floats:
    """Return the pairs of the queries start … stop − 1 with the last `window` keys, or all."""
    starts, stops = as_amounts("starts", starts), as_amounts("stops", stops)
    if (stops < starts).any():
        raise ValueError("stops must not be before starts")

    def before(position: Floats) -> Floats:
        if window is None:
            return position * (position + 1) / 2
        growing = np.minimum(position, window)  # rows before the window is full
        return growing * (growing + 1) / 2 + (position - growing) * window

    return before(stops) - before(starts)


def span_tasks(starts: ArrayLike, stops: ArrayLike, window: int | None = None) -> Tasks:
    """Return spans of documents as tasks, each with all its keys in one block."""
    starts, stops = (np.asarray(x, np.float64) for x in (starts, stops))
    pairs, rows = causal_pairs(starts, stops, window), stops - starts
    if window is None:
        return Tasks.of(rows, stops, pairs)
    keys = np.where(rows > 0, np.minimum(stops, rows + window - 1), 0.0)
    # The window excludes keys only for rows from position `window` on.
    windowed = causal_pairs(np.maximum(starts, window), np.maximum(stops, window), window)
    return Tasks.of(rows, keys, pairs, windowed / np.maximum(pairs, 1.0))


def slice_tasks(slices: Slices) -> Tasks:
    """Return slices, as masks produce them (`seqpar.layout.masks.mask`), as tasks."""
    pairs = [visible for visible, _ in slices.pairs]
    windowed = [part / max(1, visible) for visible, part in slices.pairs]
    rows, keys = (np.diff(x, axis=1)[:, 0] for x in (slices.q_rows, slices.k_rows))
    return Tasks.of(rows, keys, pairs, windowed)
