"""Cut slices into two parts of about the same area, so that work can be done in two places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqpar.arguments import Ints
from seqpar.layout.mask import Slices
from seqpar.memo import Memo

_TILE = 128  # rows: a long slice is cut at a multiple of these, so that kernels' tiles are not


def halves(slices: Slices) -> tuple[Slices, Slices]:
    """Return two parts of the slices, in order, which together are all of them.

    At most one slice is cut, between two of its query rows.
    """
    intervals = [slices.key_intervals(i) for i in range(len(slices))]
    areas = np.array([(stop - start).sum() for start, stop in intervals], dtype=np.int64)
    before, half = 0, int(areas.sum()) / 2
    cut = 0  # the slice in which the half of the area is reached
    while cut < len(slices) and before + areas[cut] <= half:
        before += int(areas[cut])
        cut += 1
    tables = slices.q_rows, slices.k_rows, slices.bands
    parts = [tuple(x[:cut] for x in tables), tuple(x[cut:] for x in tables)]
    if cut < len(slices) and (row := _row(*intervals[cut], half - before)):
        ends = [_part(slices, cut, *intervals[cut], rows) for rows in ((0, row), (row, None))]
        rest = tuple(x[cut + 1 :] for x in tables)
        parts[0] = _joined(parts[0], ends[0])
        parts[1] = _joined(ends[1], rest)
    first, last = (
        replace(slices, q_rows=q_rows, k_rows=k_rows, bands=bands, derived=Memo())
        for q_rows, k_rows, bands in parts
    )
    return first, last


def _row(start: Ints, stop: Ints, area: float) -> int:
    """Return before which row to cut a slice so that the rows before it have about this area.

    It is 0 if the slice should not be cut.
    """
    step = max(1, min(_TILE, start.size // 2))
    reached = np.r_[0, np.cumsum(stop - start)][::step]
    return int(np.argmin(np.abs(reached - area))) * step % start.size


def _part(
    slices: Slices, i: int, start: Ints, stop: Ints, rows: tuple[int, int | None]
) -> tuple[Ints, ...]:
    """Return some rows of slice i, trimmed to the keys that they see, as tables of one slice."""
    (q0, q1), k0 = slices.q_rows[i].tolist(), int(slices.k_rows[i, 0])
    some = slice(*rows)
    first, last = int(start[some].min()), int(stop[some].max())
    q_rows = [q0 + rows[0], q1 if rows[1] is None else q0 + rows[1]]
    return np.array([q_rows]), np.array([[k0 + first, k0 + last]]), slices.bands[i : i + 1]


def _joined(first: tuple[Ints, ...], last: tuple[Ints, ...]) -> tuple[Ints, ...]:
    return tuple(np.concatenate(pair) for pair in zip(first, last, strict=True))
