"""Cut slices into tiles of rows, and list the blocks of columns that each tile walks.

This is NumPy on arrays, linear in the number of (tile, slice) pairs plus the length of the
lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_UNLIMITED = 2**31 - 1  # larger than any distance of two positions, as an int32


@runtime_checkable
class SliceTable(Protocol):
    """The slices of a mask, over which attention is computed.

    Any object with these arrays is accepted. In slice i, the query rows `q_rows[i]` (start, stop)
    attend to those of the key rows `k_rows[i]` for which `bands[i, 0] <= k_position -
    q_position <= bands[i, 1]`. Slices are disjoint as sets of (query, key) pairs, and within the
    rows of a slice positions ascend. q_rows, k_rows and bands are (n, 2); positions are int32, one
    per row. The object may also have `q_aligned`, the positions of queries for distances, if not
    `q_positions`: within a slice they differ by a constant.
    """

    q_rows: Ints
    k_rows: Ints
    bands: Ints
    q_positions: NDArray[np.int32]
    k_positions: NDArray[np.int32]


class Sides(NamedTuple):
    """n slices, as rows and columns of the tiles.

    `rows`, `columns` and `bands` of column position − row position are (n, 2); then the positions
    of all rows and of all columns.
    """

    rows: Ints
    columns: Ints
    bands: Ints
    row_positions: NDArray[np.int32]
    column_positions: NDArray[np.int32]

    @classmethod
    def of(cls, slices: SliceTable) -> Sides:
        """Return the sides of tiles whose rows are queries."""
        positions, bands = slices.q_positions, slices.bands
        aligned = getattr(slices, "q_aligned", None)
        if aligned is not None and aligned is not positions and aligned.size:
            first = np.minimum(slices.q_rows[:, 0], aligned.size - 1)
            bands = bands - (aligned.astype(np.int64) - positions)[first, None]
            positions = aligned
        return cls(slices.q_rows, slices.k_rows, bands, positions, slices.k_positions)

    @property
    def transposed(self) -> Sides:
        """The sides of tiles whose rows are keys."""
        positions = self.column_positions, self.row_positions
        return Sides(self.columns, self.rows, -self.bands[:, ::-1], *positions)


@dataclass(frozen=True)
class ColumnLists:
    """The column blocks of n tiles: full ones (F,) and cut ones (C, 6).

    Tile i has the entries starts[i] … starts[i + 1] of either list.
    """

    full_starts: Ints
    full: Ints
    cut_starts: Ints
    cut: Ints

    @property
    def work(self) -> Ints:
        """The number of column blocks of each tile (n,)."""
        return np.diff(self.full_starts) + np.diff(self.cut_starts)


def tile_bounds(intervals: Ints, total: int, tile_rows: int) -> Ints:
    """Return (n, 2) tiles of at most `tile_rows` rows that cover rows 0 … total − 1.

    A tile starts at the start of each component of the (m, 2) row intervals; overlapping intervals
    are one component. The cuts of a document then do not depend on its neighbours in the pack. Rows
    outside all intervals have tiles too.
    """
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1]) if len(intervals) else intervals[:, 1]
    opens = np.r_[True, intervals[1:, 0] >= reached[:-1]][: len(intervals)]  # a component
    closes = np.r_[opens[1:], True][: len(intervals)]
    edges = np.unique(np.r_[0, intervals[opens, 0], reached[closes], total])
    starts, stops = edges[:-1], edges[1:]
    counts = -(-(stops - starts) // tile_rows)
    first = np.repeat(starts, counts) + tile_rows * _counting(counts)
    return np.stack([first, np.minimum(first + tile_rows, np.repeat(stops, counts))], 1)


def column_lists(sides: Sides, tiles: Ints, block_columns: int) -> ColumnLists:
    """Return the blocks of at most `block_columns` columns that each of the (n, 2) tiles walks.

    In a slice, a row attends to an interval of columns, whose two ends never decrease as rows
    ascend. All rows of a tile therefore attend to the columns from the last row's first column to
    the first row's last column. Whole blocks of these are full; the columns on either side are cut.
    """
    tile, index = _pairs(sides.rows, tiles)
    row = np.maximum(tiles[tile, 0], sides.rows[index, 0])
    row_stop = np.minimum(tiles[tile, 1], sides.rows[index, 1])
    low, high = sides.bands[index].T
    first_row = sides.row_positions[row].astype(np.int64)
    last_row = sides.row_positions[row_stop - 1].astype(np.int64)
    start = _bisect(sides, index, first_row + low)
    common_stop = _bisect(sides, index, first_row + high + 1)
    common = _bisect(sides, index, last_row + low)
    stop = np.maximum(start, _bisect(sides, index, last_row + high + 1))
    covers_tile = (row == tiles[tile, 0]) & (row_stop == tiles[tile, 1])
    count = np.where(covers_tile, np.maximum(common_stop - common, 0) // block_columns, 0)
    common = np.where(
        count > 0, common, start
    )  # without a full block, all columns are one cut stretch

    full = np.repeat(common, count) + block_columns * _counting(count)
    bands = np.clip(np.stack([low, high], 1), -_UNLIMITED, _UNLIMITED)
    stretches = [(start, common), (common + count * block_columns, stop)]
    cut_tile, cut = [], []
    for first, end in stretches:
        blocks = np.maximum(-(-(end - first) // block_columns), 0)
        column = np.repeat(first, blocks) + block_columns * _counting(blocks)
        others = np.stack([end, bands[:, 0], bands[:, 1], row, row_stop], 1)
        cut.append(np.c_[column, np.repeat(others, blocks, axis=0)])
        cut_tile.append(np.repeat(tile, blocks))
    cut_order, cut_starts = _grouped(np.concatenate(cut_tile), len(tiles))
    full_order, full_starts = _grouped(np.repeat(tile, count), len(tiles))
    return ColumnLists(full_starts, full[full_order], cut_starts, np.concatenate(cut)[cut_order])


def _pairs(rows: Ints, tiles: Ints) -> tuple[Ints, Ints]:
    """Return the pairs (tile, slice) that share rows."""
    if not len(tiles):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.searchsorted(tiles[:, 0], rows[:, 0], side="right") - 1
    stop = np.searchsorted(tiles[:, 0], rows[:, 1], side="left")
    counts = np.where(rows[:, 1] > rows[:, 0], stop - first, 0)
    return np.repeat(first, counts) + _counting(counts), np.repeat(np.arange(len(rows)), counts)


def _bisect(sides: Sides, index: Ints, position: Ints) -> Ints:
    """Return the first column of slice `index` at or after `position`, for each pair.

    If there is none, it is the slice's end.
    """
    start, stop = (x.copy() for x in sides.columns[index].T)
    while (unknown := start < stop).any():
        middle = (start + stop) // 2
        reached = sides.column_positions[np.where(unknown, middle, 0)] >= position
        stop = np.where(unknown & reached, middle, stop)
        start = np.where(unknown & ~reached, middle + 1, start)
    return start


def _grouped(owner: Ints, count: int) -> tuple[Ints, Ints]:
    """Return an order that groups entries by owner, and the start of each group (count + 1,)."""
    starts = np.searchsorted(np.sort(owner), np.arange(count + 1))
    return np.argsort(owner, kind="stable"), starts


def _counting(counts: Ints) -> Ints:
    """Return 0 … n − 1 for each n in counts, one after another."""
    stops = np.cumsum(counts)
    return np.arange(stops[-1] if stops.size else 0) - np.repeat(stops - counts, counts)
