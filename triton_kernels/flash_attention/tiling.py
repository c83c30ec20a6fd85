"""Cut slices into tiles of rows, and list the blocks of columns that each tile walks.

This is NumPy on arrays. Time and memory are linear in the number of (tile, slice) pairs plus the
length of the lists.
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

    Tile i has the entries full_ranges[i] (start, stop) of `full` and cut_ranges[i] of `cut`. Tiles
    share entries of `full`, so its length does not grow with the square of a document's length.
    """

    full_ranges: Ints
    full: Ints
    cut_ranges: Ints
    cut: Ints

    @property
    def full_counts(self) -> Ints:
        """The number of full blocks of each tile (n,)."""
        return self.full_ranges[:, 1] - self.full_ranges[:, 0]

    @property
    def cut_counts(self) -> Ints:
        """The number of cut blocks of each tile (n,)."""
        return self.cut_ranges[:, 1] - self.cut_ranges[:, 0]

    @property
    def work(self) -> Ints:
        """The number of column blocks of each tile (n,)."""
        return self.full_counts + self.cut_counts


def tile_bounds(intervals: Ints, total: int, tile_rows: int) -> Ints:
    """Return (n, 2) tiles of at most `tile_rows` rows that cover rows 0 … total − 1.

    A tile starts at the start of each component of the (m, 2) row intervals; overlapping intervals
    are one component. The cuts of a document then do not depend on its neighbours in the pack. Rows
    outside all intervals have tiles too.
    """
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    component_starts, component_stops, _ = _components(*intervals.T)
    edges = np.unique(np.r_[0, component_starts, component_stops, total])
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
    positions = first_row + low, first_row + high + 1, last_row + low, last_row + high + 1
    # One search for all four: in packs, the number of NumPy's calls decides the time.
    columns = _bisect(sides, np.tile(index, 4), np.concatenate(positions))
    start, common_stop, common, stop = columns.reshape(4, -1)
    stop = np.maximum(start, stop)
    covers_tile = (row == tiles[tile, 0]) & (row_stop == tiles[tile, 1])
    count = np.where(covers_tile, np.maximum(common_stop - common, 0) // block_columns, 0)
    common = np.where(
        count > 0, common, start
    )  # without a full block, all columns are one cut stretch

    full_ranges, full = _full_lists(tile, common, count, len(tiles), block_columns)
    bands = np.clip(np.stack([low, high], 1), -_UNLIMITED, _UNLIMITED)
    stretches = [(start, common), (common + count * block_columns, stop)]
    cut_tile, cut = [], []
    for first, end in stretches:
        blocks = np.maximum(-(-(end - first) // block_columns), 0)
        column = np.repeat(first, blocks) + block_columns * _counting(blocks)
        others = np.stack([end, bands[:, 0], bands[:, 1], row, row_stop], 1)
        cut.append(np.c_[column, np.repeat(others, blocks, axis=0)])
        cut_tile.append(np.repeat(tile, blocks))
    cut_order, edges = _grouped(np.concatenate(cut_tile), len(tiles))
    cut_ranges = np.stack([edges[:-1], edges[1:]], 1)
    return ColumnLists(full_ranges, full, cut_ranges, np.concatenate(cut)[cut_order])


def _full_lists(
    tile: Ints, start: Ints, count: Ints, tiles: int, block_columns: int
) -> tuple[Ints, Ints]:
    """Return the entries (start, stop) of each tile in a list of full blocks, and that list.

    A run is `count` adjacent blocks from column `start` on; run i belongs to tile[i]. Almost all
    tiles have one run, or runs that differ from those of the tile before in the last count only.
    Such tiles share entries.
    """
    used = np.flatnonzero(count)
    order, edges = _grouped(tile[used], tiles)
    start, count, runs = start[used][order], count[used][order], np.diff(edges)
    ranges = np.zeros((tiles, 2), np.int64)
    single = runs == 1
    own = edges[:-1][single]
    first, full = _shared_runs(start[own], count[own], block_columns)
    ranges[single] = np.stack([first, first + count[own]], 1)
    if (several := runs > 1).any():
        own = np.flatnonzero(np.repeat(several, runs))
        first, stop, longer = _shared_chains(start[own], count[own], runs[several], block_columns)
        ranges[several] = full.size + np.stack([first, stop], 1)
        full = np.concatenate([full, longer])
    return ranges, full


def _shared_runs(start: Ints, count: Ints, block_columns: int) -> tuple[Ints, Ints]:
    """Return the first entry of each run in a list of full blocks, and that list.

    Runs that overlap share entries if their starts differ by a multiple of a block. The list
    therefore has at most one entry per column.
    """
    per_offset = int((start // block_columns + count).max(initial=0)) + 1
    # Number all possible blocks: first the blocks on the grid, then the blocks at offset 1, etc.
    number = start % block_columns * per_offset + start // block_columns
    order = np.argsort(number, kind="stable")
    starts, stops, component = _components(number[order], (number + count)[order])
    sizes = stops - starts
    moved = np.cumsum(sizes) - sizes - starts  # from a block's number to its entry
    first = np.empty_like(number)
    first[order] = number[order] + moved[component]
    numbers = np.repeat(starts, sizes) + _counting(sizes)
    return first, numbers % per_offset * block_columns + numbers // per_offset


def _shared_chains(
    start: Ints, count: Ints, runs: Ints, block_columns: int
) -> tuple[Ints, Ints, Ints]:
    """Return the first entry and the stop of each tile in a list of full blocks, and that list.

    Tile i has the next runs[i] runs, at least two: its chain. If chains of consecutive tiles differ
    in the last count only, the tiles share the longest chain.
    """
    stops = np.cumsum(runs)
    firsts, last = stops - runs, stops - 1
    before = np.arange(start.size) - np.repeat(runs, runs)  # this run of the tile before
    differs = count != count[before]
    differs[last] = False
    differs |= start != start[before]
    opens = (np.add.reduceat(differs, firsts, dtype=np.int64) > 0) | (runs != np.roll(runs, 1))
    opens[0] = True
    leading = np.flatnonzero(opens)  # the first tile of each chain
    longest = count.copy()
    longest[last[leading]] = np.maximum.reduceat(count[last], leading)
    listed = np.repeat(firsts[leading], runs[leading]) + _counting(runs[leading])
    full = np.repeat(start[listed], longest[listed]) + block_columns * _counting(longest[listed])
    sizes = np.add.reduceat(longest, firsts)[leading]
    first = (np.cumsum(sizes) - sizes)[np.cumsum(opens) - 1]
    return first, first + np.add.reduceat(count, firsts), full


def _components(starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the start and stop of each component of overlapping intervals.

    The intervals are in the order of their starts. Also returns the component of each interval.
    """
    reached = np.maximum.accumulate(stops)
    opens = np.r_[True, starts[1:] >= reached[:-1]][: len(starts)]
    closes = np.r_[opens[1:], True][: len(starts)]
    return starts[opens], reached[closes], np.cumsum(opens) - 1


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
    """Return an order that groups entries by owner, and the edges of the groups (count + 1,)."""
    edges = np.cumsum(np.r_[0, np.bincount(owner, minlength=count)])
    return np.argsort(owner, kind="stable"), edges


def _counting(counts: Ints) -> Ints:
    """Return 0 … n − 1 for each n in counts, one after another."""
    stops = np.cumsum(counts)
    return np.arange(stops[-1] if stops.size else 0) - np.repeat(stops - counts, counts)
