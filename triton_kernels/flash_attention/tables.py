"""Tile tables: the tiles and blocks of a kernel launch, as flat arrays that the host builds.

FlashAttention-2 (Dao 2023, section 3.1) cuts queries into tiles, and each tile walks all blocks of
keys. Here a table lists the blocks of each tile, so that one kernel serves every layout and mask. A
tile is a stretch of *rows*; it walks blocks of *columns*. In the kernels of forward and dq, rows
are queries and columns are keys. In the kernel of dk and dv, rows are keys and columns are queries,
and the same code builds its table from the transposed slices.

The list `full` has the column blocks to which every row of the tile attends completely: they need
neither mask nor bounds. Tiles share its entries, so tables grow linearly with a document's length.
The list `cut` has all other blocks, each with the bounds and the band that determine its mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_int, check_list, check_type
from .configs import Config
from .tiling import ColumnLists, Ints, Sides, SliceTable, column_lists, tile_bounds

__all__ = ["Launch", "Launches", "SliceTable", "backward_launches", "forward_launches"]

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


@dataclass(frozen=True)
class Launch:
    """The tables of one kernel launch: int32 tensors on one device.

    `tiles` (n, 8) and `cut` (C, 6) have the columns named above, and `full` (F,) is the first
    column of each block. A list that the launch does not walk is empty. Positions of all rows (T,)
    and of all columns (Tk,) count within their documents; launches share them.
    """

    tiles: Tensor
    full: Tensor
    cut: Tensor
    row_positions: Tensor
    column_positions: Tensor
    has_full: bool  # whether it walks full blocks, and whether it walks cut blocks
    has_cut: bool
    has_partial: bool  # some tile starts from a partial result, or leaves one
    may_continue: bool = False  # whether launches of this kind may, over other slices
    parts: int = 1  # the number of programs that share the columns of a tile
    merges: int = 0  # the number of parts of the launch before that it merges; 0 if it computes

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """The tables, in the order in which the kernels take them."""
        return self.tiles, self.full, self.cut, self.row_positions, self.column_positions


class Launches(tuple[Launch, ...]):
    """Launches in order, with their prepared calls.

    `prepared` has calls by everything on which they depend except values (`launching.py`). It holds
    no reference to the launches, and is freed with them. Launches are equal only to themselves.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, _launches: Iterable[Launch] = ()) -> None:
        self.prepared: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Launches, (tuple(self),)

    def placed(self, place: Callable[[Tensor], Tensor]) -> Launches:
        """Return the same launches with each table replaced by `place(table)`."""
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
) -> list[Launches]:
    """Return the launches of each hop, at most two.

    Hops are slices of the same queries, computed one after another into one result. The last hop
    that touches a tile finishes it, and the very last hop finishes tiles that no hop touches. If
    the configuration requires it, full blocks have a separate launch. With `continued`, the result
    begins before the first hop and continues after the last: every tile reads and writes a partial
    result. If a hop has fewer than `programs` tiles, several programs share the columns of each
    tile, and the second launch merges the parts.
    """
    check_list("hops", hops, SliceTable)
    if not hops:
        raise ValueError("hops must not be empty")
    check_type("config", config, Config)
    check_type("device", device, torch.device)
    check_int("programs", programs, 0)
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
            of_hop = _launches(*common, config)
        either = may_continue or (parts <= 1 and config.separate)
        launches.append([replace(x, may_continue=either or x.parts > 1) for x in of_hop])
    return [Launches(of_hop).placed(lambda x: x.to(device)) for of_hop in launches]


def backward_launches(
    slices: SliceTable, config: Config, device: torch.device, transposed: bool
) -> Launches:
    """Return the launches, at most two, of a kernel that adds to gradients.

    They add to gradients of queries or, if `transposed`, of keys.
    """
    check_type("slices", slices, SliceTable)
    check_type("config", config, Config)
    check_type("device", device, torch.device)
    sides = Sides.of(slices).transposed if transposed else Sides.of(slices)
    tiles = tile_bounds(sides.rows, sides.row_positions.size, config.tile_rows)
    lists = column_lists(sides, tiles, config.block_columns)
    flags = np.zeros(len(tiles), np.int64)
    launches = _launches(sides, lists, tiles, lists.work > 0, flags, config)
    return Launches(launches).placed(lambda x: x.to(device))


def _launches(
    sides: Sides,
    lists: ColumnLists,
    tiles: Ints,
    chosen: NDArray[np.bool_],
    flags: Ints,
    config: Config,
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
    return [_launch(sides, lists, tiles, *kind) for kind in kinds if kind[0].any()]


def _split_launches(
    sides: Sides,
    lists: ColumnLists,
    tiles: Ints,
    chosen: NDArray[np.bool_],
    flags: Ints,
    parts: int,
) -> list[Launch]:
    """Return two launches: one computes parts of each tile, the other merges them.

    A part walks some of its tile's lists and writes its own partial result.
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
    """Return a launch of the chosen tiles over the full blocks of some and all cut blocks.

    `full` (n,) selects the tiles whose full blocks it walks, or is None if another launch walks
    them. Without `cut`, another launch walks the cut blocks.
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
    """Return the launch of a table of tiles (n, 8), with the longest lists first, on the CPU."""
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

    All launches over the same array share one tensor, forward and backward: positions are the
    largest part of a long document's tables. It is a copy, because Triton's interpreter finds the
    memory of a tensor by its address, which views of an array may share.
    """
    key = id(positions)
    array, copy = _positions.get(key, (None, None))
    if array is None or copy is None or array() is not positions:
        copy = _int32(positions)
        _positions[key] = weakref.ref(positions, lambda _: _positions.pop(key, None)), copy
    return copy
