"""Tile tables: slices cut into tiles on the host, so that a kernel walks a flat list whatever the layout.

A tile is a block of *rows*; it walks *columns*. In the forward kernel and in that of dq rows are queries and columns keys;
in that of dk and dv it is the other way round, and the same code builds the table from the transposed slices. Columns that
every row of the tile sees go into `full`, a list of column blocks that needs neither mask nor bounds; the others into `cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
FIRST, LAST = 1, 2  # flags of a tile: nothing came before this launch; nothing comes after it
ROW, ROW_STOP, FULL, FULL_STOP, CUT, CUT_STOP, FLAGS, PART = range(8)  # columns of `tiles`
MIN_PART = 4  # column blocks in a part of a tile whose columns are split
TILE_WIDTH = 8
_UNLIMITED = 2**31 - 1


class SliceTable(Protocol):
    """What attention is computed over: `seqpar.mask.Slices`, or anything with its arrays.

    Slice i lets the query rows `q_rows[i]` see those key rows `k_rows[i]` for which
    `bands[i, 0] <= k_position - q_position <= bands[i, 1]`. Slices are disjoint as sets of (query, key) pairs, and within
    the rows of a slice positions ascend. Positions are int32, one a row.
    """

    q_rows: Ints
    k_rows: Ints
    bands: Ints
    q_positions: NDArray[np.int32]
    k_positions: NDArray[np.int32]


class Sides(NamedTuple):
    """Slices as seen from the tiles: (n, 2) rows, columns and bands of column − row, and the positions of both."""

    rows: Ints
    columns: Ints
    bands: Ints
    row_positions: NDArray[np.int32]
    column_positions: NDArray[np.int32]

    @classmethod
    def of(cls, slices: SliceTable) -> Sides:
        return cls(slices.q_rows, slices.k_rows, slices.bands, slices.q_positions, slices.k_positions)

    @property
    def transposed(self) -> Sides:
        return Sides(self.columns, self.rows, -self.bands[:, ::-1], self.column_positions, self.row_positions)


@dataclass(frozen=True)
class Lists:
    """For each of n tiles which entries of `full` and of `cut` are its own: entries starts[i] … starts[i + 1]."""

    full_starts: Ints
    full: Ints
    cut_starts: Ints
    cut: Ints

    @property
    def work(self) -> Ints:
        """(n,) how many column blocks each tile walks."""
        return np.diff(self.full_starts) + np.diff(self.cut_starts)


@dataclass(frozen=True)
class Launch:
    """What one kernel launch reads: tiles (n, 8), full (F,), cut (C, 6), and positions of rows and columns; all int32."""

    tiles: Tensor
    full: Tensor
    cut: Tensor
    row_positions: Tensor
    column_positions: Tensor
    has_full: bool
    has_cut: bool
    has_partial: bool  # some tile starts from a partial result, or leaves one
    has_final: bool
    parts: int = 1  # over how many programs the columns of a tile are split
    merges: int = 0  # how many parts of the launch before it this one joins; 0 if it computes

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return self.tiles, self.full, self.cut, self.row_positions, self.column_positions


def tile_bounds(intervals: Ints, total: int, block: int) -> Ints:
    """(n, 2) tiles of at most `block` rows that cover rows 0 … total − 1.

    A tile starts wherever a component of the (m, 2) row intervals does (intervals that overlap are one component), so that
    where a document is cut does not depend on its neighbours in the pack. Rows in no interval get tiles too.
    """
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1]) if len(intervals) else intervals[:, 1]
    new = np.r_[True, intervals[1:, 0] >= reached[:-1]][: len(intervals)]
    last = np.r_[new[1:], True][: len(intervals)]
    edges = np.unique(np.r_[0, intervals[new, 0], reached[last], total])
    starts, stops = edges[:-1], edges[1:]
    counts = -(-(stops - starts) // block)
    first = np.repeat(starts, counts) + block * _counting(counts)
    return np.stack([first, np.minimum(first + block, np.repeat(stops, counts))], 1)


def column_lists(sides: Sides, tiles: Ints, block: int) -> Lists:
    """The column blocks that each tile walks: linear in (tile, slice) pairs plus the length of the lists."""
    tile, index = _pairs(sides.rows, tiles)
    row, row_stop = (np.maximum(tiles[tile, 0], sides.rows[index, 0]), np.minimum(tiles[tile, 1], sides.rows[index, 1]))
    low, high = sides.bands[index].T
    reach = []  # the interval of columns that the first row sees, then that of the last
    for at in (row, row_stop - 1):
        position = sides.row_positions[at].astype(np.int64)
        reach += [_bisect(sides, index, position + low), _bisect(sides, index, position + high + 1)]
    start, common_stop, common, stop = reach
    stop = np.maximum(start, stop)
    whole = (row == tiles[tile, 0]) & (row_stop == tiles[tile, 1])
    count = np.where(whole, np.maximum(common_stop - common, 0) // block, 0)
    common = np.where(count > 0, common, start)  # without a full block all that is seen is one cut stretch

    full = np.repeat(common, count) + block * _counting(count)
    bands = np.clip(np.stack([low, high], 1), -_UNLIMITED, _UNLIMITED)
    stretches = [(start, common), (common + count * block, stop)]
    cut_tile, cut = [], []
    for first, end in stretches:
        blocks = np.maximum(-(-(end - first) // block), 0)
        column = np.repeat(first, blocks) + block * _counting(blocks)
        fixed = np.repeat(np.stack([end, bands[:, 0], bands[:, 1], row, row_stop], 1), blocks, axis=0)
        cut.append(np.c_[column, fixed])
        cut_tile.append(np.repeat(tile, blocks))
    order, cut_starts = _grouped(np.concatenate(cut_tile), len(tiles))
    full_order, full_starts = _grouped(np.repeat(tile, count), len(tiles))
    return Lists(full_starts, full[full_order], cut_starts, np.concatenate(cut)[order])


def forward_launches(
    hops: Sequence[SliceTable],
    rows: int,
    columns: int,
    device: torch.device,
    separate: bool,
    continued: bool = False,
    programs: int = 0,
) -> list[list[Launch]]:
    """For each hop its launches, at most two: slices of the same queries, one hop after another, merged into one result.

    The last hop that touches a tile finalises it, and the last of all those that no hop touches. With `separate` the full
    blocks get a launch of their own, which hardware can specialise. With `continued` the result was begun before the first
    hop and goes on after the last: every tile reads a partial result and leaves one. Where a hop has fewer than `programs`
    tiles, the columns of each are split, and the second launch joins the parts.
    """
    sides = [Sides.of(hop) for hop in hops]
    tiles = tile_bounds(np.concatenate([side.rows for side in sides]), sides[0].row_positions.size, rows)
    lists = [column_lists(side, tiles, columns) for side in sides]
    touched = np.stack([each.work > 0 for each in lists])
    begun = np.cumsum(touched, 0) - touched > 0  # by an earlier hop
    remains = np.cumsum(touched[::-1], 0)[::-1] - touched > 0  # for a later hop
    flags = np.where(begun | continued, 0, FIRST) | np.where(remains | continued, 0, LAST)
    if not continued:
        touched[-1] |= ~touched.any(0)
    plan = []
    for side, each, which, flag in zip(sides, lists, touched, flags, strict=True):
        parts = min(programs // max(1, which.sum()), each.work.max(initial=0) // MIN_PART)
        common = (side, each, tiles, which, flag, device)
        plan.append(_split(*common, int(parts)) if parts > 1 else _launches(*common, separate))
    return plan


def backward_launches(
    slices: SliceTable, rows: int, columns: int, device: torch.device, separate: bool, transposed: bool
) -> list[Launch]:
    """The launches of a kernel that adds to the gradients of queries, or `transposed`, of keys: at most two."""
    sides = Sides.of(slices).transposed if transposed else Sides.of(slices)
    tiles = tile_bounds(sides.rows, sides.row_positions.size, rows)
    lists = column_lists(sides, tiles, columns)
    return _launches(sides, lists, tiles, lists.work > 0, np.zeros(len(tiles), np.int64), device, separate)


def _launches(
    sides: Sides, lists: Lists, tiles: Ints, which: NDArray[np.bool_], flags: Ints, device: torch.device, separate: bool
) -> list[Launch]:
    has_full, has_cut = np.diff(lists.full_starts) > 0, np.diff(lists.cut_starts) > 0
    parts = [(which, flags, True, True)]
    if separate:
        both = has_full & has_cut
        before, after = np.where(both, flags & ~LAST, flags), np.where(both, flags & ~FIRST, flags)
        parts = [(which & has_full, before, True, False), (which & (has_cut | ~has_full), after, False, True)]
    return [_launch(sides, lists, tiles, *part, device) for part in parts if part[0].any()]


def _split(
    sides: Sides, lists: Lists, tiles: Ints, which: NDArray[np.bool_], flags: Ints, device: torch.device, parts: int
) -> list[Launch]:
    """Two launches: parts of each tile's lists, every one with a partial result of its own, and what joins them."""
    steps = np.arange(parts + 1)
    full, cut = (x[:-1, None] + np.diff(x)[:, None] * steps // parts for x in (lists.full_starts, lists.cut_starts))
    table = np.zeros((len(tiles), parts, TILE_WIDTH), np.int64)
    table[..., [ROW, ROW_STOP]], table[..., FLAGS], table[..., PART] = tiles[:, None], FIRST, np.arange(parts)
    table[..., FULL], table[..., FULL_STOP] = full[:, :-1], full[:, 1:]
    table[..., CUT], table[..., CUT_STOP] = cut[:, :-1], cut[:, 1:]
    computing = _table_launch(sides, lists, table[which].reshape(-1, TILE_WIDTH), device)
    joining = _launch(sides, lists, tiles, which, flags, False, False, device)
    return [replace(computing, parts=parts), replace(joining, merges=parts)]


def _launch(
    sides: Sides, lists: Lists, tiles: Ints, which: NDArray[np.bool_], flags: Ints, full: bool, cut: bool, device: torch.device
) -> Launch:
    table = np.zeros((len(tiles), TILE_WIDTH), np.int64)
    table[:, [ROW, ROW_STOP]] = tiles
    if full:
        table[:, FULL], table[:, FULL_STOP] = lists.full_starts[:-1], lists.full_starts[1:]
    if cut:
        table[:, CUT], table[:, CUT_STOP] = lists.cut_starts[:-1], lists.cut_starts[1:]
    table[:, FLAGS] = flags
    return _table_launch(sides, lists, table[which], device)


def _table_launch(sides: Sides, lists: Lists, table: Ints, device: torch.device) -> Launch:
    work = table[:, FULL_STOP] - table[:, FULL] + table[:, CUT_STOP] - table[:, CUT]
    table = table[np.argsort(-work, kind="stable")]  # longest first
    whole = (table[:, FLAGS] == FIRST | LAST).all()
    arrays: list[NDArray[Any]] = [table, lists.full, lists.cut, sides.row_positions, sides.column_positions]
    on_device = _to_device(arrays, device)
    return Launch(
        tiles=on_device[0],
        full=on_device[1],
        cut=on_device[2],
        row_positions=on_device[3],
        column_positions=on_device[4],
        has_full=bool((table[:, FULL_STOP] > table[:, FULL]).any()),
        has_cut=bool((table[:, CUT_STOP] > table[:, CUT]).any()),
        has_partial=not whole,
        has_final=bool((table[:, FLAGS] & LAST).any()),
    )


def _to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as int32 tensors, in one copy; each begins at a multiple of 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    buffer = torch.zeros(sum(sizes) + 4, dtype=torch.int32)  # never empty: a kernel is given a valid address
    parts = buffer[: sum(sizes)].split(sizes)
    for part, array in zip(parts, arrays, strict=True):
        part[: array.size] = torch.from_numpy(np.ascontiguousarray(array)).flatten().int()
    return list(buffer.to(device)[: sum(sizes)].split(sizes))


def _pairs(rows: Ints, tiles: Ints) -> tuple[Ints, Ints]:
    """(tile, slice) of every tile that shares rows with a slice."""
    if not len(tiles):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.searchsorted(tiles[:, 0], rows[:, 0], side="right") - 1
    counts = np.where(rows[:, 1] > rows[:, 0], np.searchsorted(tiles[:, 0], rows[:, 1], side="left") - first, 0)
    return np.repeat(first, counts) + _counting(counts), np.repeat(np.arange(len(rows)), counts)


def _bisect(sides: Sides, index: Ints, position: Ints) -> Ints:
    """For each pair the first column of its slice at `position` or beyond, or the slice's end."""
    start, stop = (x.copy() for x in sides.columns[index].T)
    while (open_ := start < stop).any():
        middle = (start + stop) // 2
        beyond = np.where(open_, sides.column_positions[np.where(open_, middle, 0)] >= position, True)
        stop = np.where(open_ & beyond, middle, stop)
        start = np.where(open_ & ~beyond, middle + 1, start)
    return start


def _grouped(owner: Ints, count: int) -> tuple[Ints, Ints]:
    """The order that brings entries of one owner together, and where each owner's begin."""
    return np.argsort(owner, kind="stable"), np.searchsorted(np.sort(owner), np.arange(count + 1))


def _counting(counts: Ints) -> Ints:
    """0 … n − 1 for each n in counts, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)
