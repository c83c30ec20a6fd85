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
    parts: tuple[list[tuple[Ints, ...]], list[tuple[Ints, ...]]] = [], []
    for i in range(len(slices)):
        interval = slices.key_intervals(i)
        row = _row(*interval)
        parts[0].append(_part(slices, i, *interval, (0, row)))
        if row is not None:
            parts[1].append(_part(slices, i, *interval, (row, None)))
    none = tuple(x[:0] for x in (slices.q_rows, slices.k_rows, slices.bands))
    first, last = (
        replace(slices, q_rows=q_rows, k_rows=k_rows, bands=bands, derived=Memo())
        for q_rows, k_rows, bands in (
            map(np.concatenate, zip(none, *part, strict=True)) for part in parts
        )
    )
    return first, last


def _row(start: Ints, stop: Ints) -> int | None:
    """Return the row before which to halve a slice's area, between tiles if it is long; or None."""
    if start.size < 2:
        return None
    step = min(_TILE_ROWS, start.size // 2)
    reached = np.cumsum(stop - start)[step - 1 : -1 : step]
    return (int(np.argmin(np.abs(reached - (stop - start).sum() / 2))) + 1) * step


def _part(
    slices: Slices, i: int, start: Ints, stop: Ints, rows: tuple[int, int | None]
) -> tuple[Ints, ...]:
    """Return some rows of slice i as tables of one slice, trimmed to pairs that attend."""
    seeing = np.flatnonzero(stop[slice(*rows)] > start[slice(*rows)])[[0, -1]] + rows[0]
    q0, k0 = int(slices.q_rows[i, 0]), int(slices.k_rows[i, 0])
    k_rows = [k0 + int(start[seeing[0]]), k0 + int(stop[seeing[1]])]
    q_rows = [q0 + int(seeing[0]), q0 + int(seeing[1]) + 1]
    return np.array([q_rows]), np.array([k_rows]), slices.bands[i : i + 1]
