"""Tile tables: the tiles and blocks of a kernel launch, as flat arrays that the host builds.

FlashAttention-2 (Dao 2023, section 3.1) cuts queries into tiles, and the program of a tile loops
over all blocks of keys: the tile *walks* the blocks. Here a table lists the blocks of each tile, so
that one kernel serves every layout and mask. A tile is a stretch of *rows*, and it walks blocks of
*columns*. In the kernels of forward and dq, rows are queries and columns are keys. In the kernel of
dk and dv, rows are keys and columns are queries, and the same code builds its table from the
transposed slices.

The list `full` has the column blocks to which every row of the tile attends completely. They need
neither a mask nor bounds. Tiles share entries of `full`, so tables grow linearly with a document's
length. The list `cut` has all other blocks. Each entry has the bounds and the band that determine
the block's mask.

NumPy builds the tables. Its time and memory are linear in the number of (tile, slice) pairs plus
the length of the lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_int, check_list, check_type
from .configs import Config

T = TypeVar("T")
Ints = NDArray[np.int64]
_UNLIMITED = 2**31 - 1  # larger than any distance of two positions, as an int32

# Kernels can read these as they are `tl.constexpr`; the host can index with them as they are
# integers. Columns of `tiles`: a tile's rows; its entries of `full` and of `cut`; its flags; the
# number of its part, if the tile is split.
TILE_START, TILE_STOP, FULL_START, FULL_STOP, CUT_START, CUT_STOP, FLAGS, PART = map(
    tl.constexpr, range(8)
)
TILE_WIDTH = tl.constexpr(8)
# Columns of `cut`: a block's first column, and the stop of the slice's columns in it; the slice's
# band; and the rows of the tile that belong to the slice.
COLUMN_START, COLUMN_STOP, BAND_LOW, BAND_HIGH, ROW_START, ROW_STOP = map(tl.constexpr, range(6))
CUT_WIDTH = tl.constexpr(6)
# Flags of a tile: FIRST if no earlier launch computes it; LAST if no later launch does, so that it
# is finished here. Kernels test them by flags % LAST and flags // LAST: with & ptxas spills more.
FIRST, LAST = tl.constexpr(1), tl.constexpr(2)
_FIRST, _LAST = FIRST.value, LAST.value

MIN_PART = 4  # column blocks in a part of a tile whose columns are split


@runtime_checkable
class SliceTable(Protocol):
    """The slices of a mask, over which attention is computed.

    Any object with these arrays is accepted. In slice i, the query rows `q_rows[i]` (start, stop)
    attend to the key rows `k_rows[i]`, if a pair satisfies

        bands[i, 0] <= k_position - q_position <= bands[i, 1]

    Slices are disjoint as sets of (query, key) pairs. Positions ascend within the rows of a slice.
    q_rows, k_rows and bands are (n, 2), and positions are int32, one for each row. The object may
    also have `q_aligned`: the positions of queries from which distances are computed, if these are
    not `q_positions`. Within a slice, the two differ by a constant.
    """

    q_rows: Ints
    k_rows: Ints
    bands: Ints
    q_positions: NDArray[np.int32]
    k_positions: NDArray[np.int32]


class Sides(NamedTuple):
    """n slices, described as rows and columns of tiles.

    `rows` and `columns` are (n, 2). `bands` (n, 2) limit column position − row position. The
    positions of all rows and of all columns follow.
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
class Launch:
    """The tables of one kernel launch: int32 tensors on one device.

    `tiles` (n, 8) and `cut` (C, 6) have the columns named above. `full` (F,) has the first column
    of each block. `tiles` lists ranges of rows, `full` lists blocks of columns without a mask, and
    `cut` lists blocks of columns with a mask. If the launch does not compute the blocks of a list,
    the list is empty. Positions of all rows (T,) and of all columns (Tk,) are counted within their
    documents. Launches share the tensors of positions.
    """

    tiles: Tensor
    full: Tensor
    cut: Tensor
    row_positions: Tensor
    column_positions: Tensor
    has_full: bool  # whether the launch walks full blocks
    has_cut: bool
    has_partial: bool  # whether a tile starts from a partial result, or leaves one
    may_continue: bool = False  # whether launches of this kind may, over other slices
    parts: int = 1  # the number of programs that share the columns of a tile
    merges: int = 0  # if it merges: the number of parts per tile; else 0

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """The tables, in the order of the parameters of the kernels."""
        return self.tiles, self.full, self.cut, self.row_positions, self.column_positions


_MOST_PREPARED = 256


class Launches(tuple[Launch, ...]):
    """Launches in their order, with their prepared calls.

    The keys of `prepared` contain everything on which a call depends, except values
    (`launching.py`). `prepared` has no reference to the launches, and is freed with them. Launches
    are equal only to themselves.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, _launches: Iterable[Launch] = ()) -> None:
        self.prepared: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, call: T) -> T:
        """Keep a prepared call, and return it. A scale may differ in every call, so older calls are
        dropped if there are many.
        """
        if len(self.prepared) >= _MOST_PREPARED:
            self.prepared.clear()  # other threads keep what they have read
        self.prepared[key] = call
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return Launches, (tuple(self),)

    def placed(self, place: Callable[[Tensor], Tensor]) -> Launches:
        """Return the same launches, where `place(table)` replaces each table."""
        return Launches(
            replace(
                x, tiles=place(x.tiles), full=place(x.full), cut=place(x.cut),
                row_positions=place(x.row_positions), column_positions=place(x.column_positions),
            )
            for x in self
        )  # fmt: skip


def forward_launches(
    hops: Sequence[SliceTable],
    config: Config,
    device: torch.device,
    continued: bool = False,
    programs: int = 0,
    most_runs: int = 0,
) -> list[Launches]:
    """Return the launches of each hop. A hop has one or two launches.

    A *hop* is attention of the queries over one block of keys. Hops are computed one after another
    into one result. A *tile* is a range of queries. The last hop whose keys a tile attends to
    finishes the tile. Tiles that attend to no keys are finished by the last of all hops. If the
    configuration requires it, full blocks have a separate launch. With `continued`, the result
    begins before the first hop and continues after the last hop, so every tile reads and writes a
    partial result. If a hop has fewer than `programs` tiles, several programs compute each tile,
    each over some of the keys, and a second launch merges their results.

    With `most_runs`, the launches depend only on `most_runs` and on the numbers of rows and
    columns, and their tables are padded (`_padded`). Such tables can be made for any slices whose
    rows have at most `most_runs` runs, so that a CUDA graph can be replayed with different tables.
    With `most_runs`, `programs` must be 0.
    """
    check_list("hops", hops, SliceTable)
    if not hops:
        raise ValueError("hops must not be empty")
    check_type("config", config, Config)
    check_type("device", device, torch.device)
    check_int("programs", programs, 0)
    check_int("most_runs", most_runs, 0)
    sides = [Sides.of(hop) for hop in hops]
    all_rows = np.concatenate([side.rows for side in sides])
    tiles = tile_bounds(all_rows, sides[0].row_positions.size, config.tile_rows)
    lists = [column_lists(side, tiles, config.block_columns) for side in sides]
    touched = np.stack([hop_lists.work > 0 for hop_lists in lists])
    earlier = np.cumsum(touched, 0) - touched > 0  # (hops, tiles): an earlier hop touches the tile
    later = np.cumsum(touched[::-1], 0)[::-1] - touched > 0
    flags = np.where(earlier | continued, 0, _FIRST) | np.where(later | continued, 0, _LAST)
    if not continued:
        touched[-1] |= ~touched.any(0)
    may_continue = continued or len(hops) > 1
    launches = list[list[Launch]]()
    for side, hop_lists, chosen, hop_flags in zip(sides, lists, touched, flags, strict=True):
        parts = min(programs // max(1, chosen.sum()), hop_lists.work.max(initial=0) // MIN_PART)
        common = (side, hop_lists, tiles, chosen, hop_flags)
        if parts > 1:
            of_hop = _split_launches(*common, int(parts))
        else:
            of_hop = _launches(*common, config, most_runs)
        either = may_continue or (parts <= 1 and config.separate)
        launches.append([replace(x, may_continue=either or x.parts > 1) for x in of_hop])
    return [Launches(of_hop).placed(lambda x: x.to(device)) for of_hop in launches]


def backward_launches(
    slices: SliceTable,
    config: Config,
    device: torch.device,
    transposed: bool,
    most_runs: int = 0,
) -> Launches:
    """Return the launches, at most two, of a kernel that adds to gradients.

    The gradients are those of queries or, with `transposed`, those of keys. For `most_runs` see
    `forward_launches`.
    """
    check_type("slices", slices, SliceTable)
    check_type("config", config, Config)
    check_type("device", device, torch.device)
    sides = Sides.of(slices).transposed if transposed else Sides.of(slices)
    tiles = tile_bounds(sides.rows, sides.row_positions.size, config.tile_rows)
    lists = column_lists(sides, tiles, config.block_columns)
    flags = np.zeros(len(tiles), np.int64)
    launches = _launches(sides, lists, tiles, lists.work > 0, flags, config, most_runs)
    return Launches(launches).placed(lambda x: x.to(device))


def _launches(
    sides: Sides,
    lists: ColumnLists,
    tiles: Ints,
    chosen: NDArray[np.bool_],
    flags: Ints,
    config: Config,
    most_runs: int,
) -> list[Launch]:
    """Return one launch of the chosen tiles, or two if the configuration separates them."""
    has_full, has_cut = lists.full_counts > 0, lists.cut_counts > 0
    kinds: list[tuple[NDArray[np.bool_], Ints, NDArray[np.bool_] | None, bool]]
    kinds = [(chosen, flags, has_full, True)]
    if config.separate:
        in_both = has_full & has_cut
        full_flags = np.where(in_both, flags & ~_LAST, flags)
        cut_flags = np.where(in_both, flags & ~_FIRST, flags)
        kinds = [
            (chosen & has_full, full_flags, has_full, False),
            (chosen & (has_cut | ~has_full), cut_flags, None, True),
        ]
    if not most_runs or not sides.column_positions.size:
        return [_launch(sides, lists, tiles, *kind) for kind in kinds if kind[0].any()]
    return [_padded(_launch(sides, lists, tiles, *kind), config, most_runs) for kind in kinds]


def _padded(launch: Launch, config: Config, most_runs: int) -> Launch:
    """Return the launch with tables whose sizes depend only on the numbers of rows and columns.

    Additional tiles have no rows. They are placed at the end of the rows, because descriptors of 0
    rows are not defined. The sizes are sufficient if a row attends to one range of columns in its
    own run, as in layouts that cut a pack into ranges. If the sizes are not sufficient, a
    ValueError is raised.
    """
    rows, columns = launch.row_positions.numel(), launch.column_positions.numel()
    tiles = rows // config.tile_rows + most_runs
    # A tile's cut blocks: as many columns as it has rows at both ends, and a block that is not
    # full. Where a window ends within a tile, all columns are cut.
    ends = 2 * -(-config.tile_rows // config.block_columns) + 4
    cut = tiles * ends + 2 * (columns // config.block_columns)
    full = columns
    if columns > rows:  # of several ranks: a tile has a run in each, and may share none
        full += tiles * (columns // config.block_columns)

    def filled(table: Tensor, size: int, entry: Sequence[int] | int) -> Tensor:
        if len(table) > size:
            raise ValueError(
                f"most_runs is too small: a table has {len(table)} entries, not {size}"
            )
        added = table.new_tensor([entry]).expand(size - len(table), *table.shape[1:])
        return torch.cat([table, added])

    return replace(
        launch,
        tiles=filled(launch.tiles, tiles, [rows, rows, 0, 0, 0, 0, 0, 0]),
        full=filled(launch.full, full if launch.has_full else 0, 0),
        cut=filled(launch.cut, cut if launch.has_cut else 0, [0] * CUT_WIDTH.value),
        has_partial=True,
    )


def _split_launches(
    sides: Sides,
    lists: ColumnLists,
    tiles: Ints,
    chosen: NDArray[np.bool_],
    flags: Ints,
    parts: int,
) -> list[Launch]:
    """Return two launches: one computes parts of each tile, and one merges the parts.

    A part walks some of the blocks in its tile's lists, and writes a separate partial result.
    """
    steps = np.arange(parts + 1)
    ranges = lists.full_ranges, lists.cut_ranges
    full, cut = (x[:, :1] + np.diff(x) * steps // parts for x in ranges)
    table = np.zeros((len(tiles), parts, TILE_WIDTH), np.int64)
    table[..., TILE_START], table[..., TILE_STOP] = tiles[:, None, 0], tiles[:, None, 1]
    table[..., FULL_START], table[..., FULL_STOP] = full[:, :-1], full[:, 1:]
    table[..., CUT_START], table[..., CUT_STOP] = cut[:, :-1], cut[:, 1:]
    table[..., FLAGS], table[..., PART] = _FIRST, np.arange(parts)
    computing = _table_launch(sides, lists, table[chosen].reshape(-1, TILE_WIDTH), True, True)
    merging = _launch(sides, lists, tiles, chosen, flags, None, False)
    return [replace(computing, parts=parts), replace(merging, merges=parts)]


def _launch(
    sides: Sides,
    lists: ColumnLists,
    tiles: Ints,
    chosen: NDArray[np.bool_],
    flags: Ints,
    full: NDArray[np.bool_] | None,
    cut: bool,
) -> Launch:
    """Return a launch of the chosen tiles over the full blocks of some tiles and the cut blocks of
    all.

    A block of columns is *full* if all rows of the tile attend to all of its columns, and *cut* in
    all other cases. `full` (n,) selects the tiles whose full blocks the launch computes. If `full`
    is None, a different launch computes the full blocks. Without `cut`, a different launch computes
    the cut blocks.
    """
    table = np.zeros((len(tiles), TILE_WIDTH), np.int64)
    table[:, TILE_START], table[:, TILE_STOP] = tiles.T
    if full is not None:
        starts, stops = lists.full_ranges.T
        table[:, FULL_START], table[:, FULL_STOP] = starts, np.where(full, stops, starts)
    if cut:
        table[:, CUT_START], table[:, CUT_STOP] = lists.cut_ranges.T
    table[:, FLAGS] = flags
    return _table_launch(sides, lists, table[chosen], full is not None, cut)


def _table_launch(
    sides: Sides,
    lists: ColumnLists,
    table: Ints,
    has_full: bool,
    has_cut: bool,
) -> Launch:
    """Return the launch of a table of tiles (n, 8), on the CPU.

    Tiles with the longest lists come first.
    """
    full_blocks = table[:, FULL_STOP] - table[:, FULL_START]
    cut_blocks = table[:, CUT_STOP] - table[:, CUT_START]
    return Launch(
        _int32(table[np.argsort(-(full_blocks + cut_blocks), kind="stable")]),
        _int32(lists.full if has_full else lists.full[:0]),
        _int32(lists.cut if has_cut else lists.cut[:0]),
        _positions_of(sides.row_positions),
        _positions_of(sides.column_positions),
        has_full=has_full,
        has_cut=has_cut,
        has_partial=bool((table[:, FLAGS] != _FIRST | _LAST).any()),
    )


def _int32(array: Ints | NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


_positions: dict[int, tuple[weakref.ref[NDArray[np.int32]], Tensor]] = {}  # by the id of an array


def _positions_of(positions: NDArray[np.int32]) -> Tensor:
    """Return positions as a tensor.

    All launches over the same array share one tensor, in forward and in backward, because positions
    are the largest part of a long document's tables. The tensor is a copy. Triton's interpreter
    finds the memory of a tensor by its address, and views of an array may have the same address.
    """
    key = id(positions)
    array, copy = _positions.get(key, (None, None))
    if array is None or copy is None or array() is not positions:
        copy = _int32(positions)
        _positions[key] = weakref.ref(positions, lambda _: _positions.pop(key, None)), copy
    return copy


@dataclass(frozen=True)
class ColumnLists:
    """The column blocks of n tiles: full blocks (F,) and cut blocks (C, 6).

    A block is *full* if all rows of the tile attend to all of its columns, and *cut* in all other
    cases.

    Tile i has the entries full_ranges[i] (start, stop) of `full`, and the entries cut_ranges[i] of
    `cut`. Tiles share entries of `full`, so its length does not grow with the square of a
    document's length.
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
    """Return (n, 2) tiles, which are ranges of at most `tile_rows` rows, for the rows 0 … total −
    1.

    Overlapping intervals of rows (m, 2) form a component. A tile begins where a component begins.
    The tiles of a document therefore do not depend on its neighbours in the packed batch. Rows
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
    """Return the blocks of at most `block_columns` columns to which each of the (n, 2) tiles
    attends.

    In a slice, each row attends to an interval of columns, and the two ends of the interval never
    decrease from row to row. All rows of a tile therefore attend to the columns from the first
    column of the last row to the last column of the first row. These columns are divided into full
    blocks, which need no mask. The columns on either side are divided into cut blocks, which need a
    mask.
    """
    tile, index = _pairs(sides.rows, tiles)
    row = np.maximum(tiles[tile, 0], sides.rows[index, 0])
    row_stop = np.minimum(tiles[tile, 1], sides.rows[index, 1])
    low, high = sides.bands[index].T
    first_row = sides.row_positions[row].astype(np.int64)
    last_row = sides.row_positions[row_stop - 1].astype(np.int64)
    positions = first_row + low, first_row + high + 1, last_row + low, last_row + high + 1
    # One search finds all four, because in packs the time depends on the number of NumPy calls.
    columns = _bisect(sides, np.tile(index, 4), np.concatenate(positions))
    start, common_stop, common, stop = columns.reshape(4, -1)
    stop = np.maximum(start, stop)
    covers_tile = (row == tiles[tile, 0]) & (row_stop == tiles[tile, 1])
    count = np.where(covers_tile, np.maximum(common_stop - common, 0) // block_columns, 0)
    common = np.where(
        count > 0, common, start
    )  # without a full block, all columns are one range of cut blocks

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
    """Return the entries (start, stop) of each tile in a list of full blocks, and the list.

    A run is `count` adjacent blocks from column `start` on, and run i belongs to tile[i]. Almost
    all tiles have one run, or have runs that differ from the runs of the preceding tile only in the
    last count. These tiles share entries.
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
    """Return the first entry of each run in a list of full blocks, and the list.

    A run is `count` adjacent blocks of columns. Runs that overlap share entries if their starts
    differ by a multiple of a block. The list therefore has at most one entry per column.
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
    """Return the first entry and the stop of each tile in a list of full blocks, and the list.

    A run is `count` adjacent blocks of columns. The chain of tile i consists of the next runs[i]
    runs, at least two. Consecutive tiles whose chains differ only in the last count share the
    longest of these chains.
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

    The intervals must be in the order of their starts. Also returns the component of each interval.
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

    If a slice has no such column, the stop of the slice is returned.
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
