"""Split slices into two parts of about the same area, for work that is done in two places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices

_TILE_ROWS = 128  # long slices are cut at multiples of this, so that kernels' tiles stay whole


def halves(slices: Slices) -> tuple[Slices, Slices]:
    """Return two parts of the slices, in order, which together are all of them.

    Each slice is cut at half of its area, so a document's bits do not depend on its neighbours.
    """
    lengths = np.diff(slices.q_rows)[:, 0]
    queries, keys = (np.stack([x, x], axis=1) for x in (slices.q_rows, slices.k_rows))
    queries[:, 0, 1] = queries[:, 1, 0] = slices.q_rows[:, 0] + _middle(lengths)
    is_cut = lengths > 1
    queries[~is_cut, 0] = slices.q_rows[~is_cut]
    for i in np.flatnonzero(~slices.full).tolist():
        interval = slices.key_intervals(i)
        row = _row(*interval)
        for part, rows in enumerate([(0, row), (row, None)][: 1 + is_cut[i]]):
            queries[i, part], keys[i, part] = _part(slices, i, *interval, rows)
    first, last = (
        replace(
            slices,
            q_rows=queries[chosen, part],
            k_rows=keys[chosen, part],
            bands=slices.bands[chosen],
            derived=Memo(),
        )
        for part, chosen in enumerate((np.ones_like(is_cut), is_cut))
    )
    return first, last


def _middle(lengths: Ints) -> Ints:
    """Return what `_row` returns for slices of these numbers of rows, if all pairs are visible."""
    step = np.clip(lengths // 2, 1, _TILE_ROWS)
    below = lengths // (2 * step)
    above_is_closer = 2 * step * (below + 1) - lengths < lengths - 2 * step * below
    return (below + above_is_closer) * step


def _row(start: Ints, stop: Ints) -> int | None:
    """Return the row before which to halve a slice's area, between tiles if it is long; or None."""
    if start.size < 2:
        return None
    step = min(_TILE_ROWS, start.size // 2)
    reached = np.cumsum(stop - start)[step - 1 : -1 : step]
    return (int(np.argmin(np.abs(reached - (stop - start).sum() / 2))) + 1) * step


def _part(
    slices: Slices, i: int, start: Ints, stop: Ints, rows: tuple[int | None, int | None]
) -> tuple[Ints, Ints]:
    """Return the query and key rows of some rows of slice i, trimmed to pairs that attend."""
    seeing = np.flatnonzero(stop[slice(*rows)] > start[slice(*rows)])[[0, -1]] + (rows[0] or 0)
    first, last = seeing
    return slices.q_rows[i, 0] + [first, last + 1], slices.k_rows[i, 0] + [start[first], stop[last]]
