"""Cut slices into the rectangles that ATen's CPU kernel can compute, which are called pieces.

A *slice* is a range of query rows and a range of key rows with a mask (`layout/masks/mask.py`). A
*piece* is a rectangle of query rows and key rows. The kernel can compute a piece without a mask,
and a piece with an additive mask. If the piece is a square, the kernel can also apply a causal
mask. Pieces are cut by rows, not by positions. Rows ascend in position, both for queries and for
keys. Under a causal mask, a rank's own tokens of a document are therefore a single causal square in
any layout. Most steps of Ring take one or two kernel calls without a mask.

Letters of shapes: B is the batch, Hq the number of query heads, n the number of query rows, and m
the number of key rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.call_options import aligned_positions, distances

# Limits for the query rows of a tile with a mask. From 768 rows on, ATen's CPU kernel uses its
# largest blocks.
_MIN_TILE_ROWS, _MAX_TILE_ROWS = 64, 768
# A *run* is consecutive query rows with the same keys. If runs have on average at least this number
# of rows, a slice is cut at the ends of runs, and needs no mask.
_MIN_RUN_ROWS = 256

_BIASED_TILE_ROWS = 256  # query rows; larger tiles need larger masks at the diagonal
_MIN_BIASED_KEYS = 64  # the smallest number of keys of a piece whose mask has a single row
_MAX_BIASED_SCORES = 2**24  # the largest number of scores of a piece whose mask has all rows


class Piece(NamedTuple):
    """A rectangle of query rows and key rows that one kernel call computes.

    If `causal` is True, the rectangle is a square with a causal mask. If `band` is given, it
    contains two numbers, low and high, and a query attends to the keys for which low ≤ (position of
    key) − (position of query) ≤ high. In all other cases, each query attends to all keys of the
    rectangle.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    band: tuple[int, ...] | None = None  # low and high
    blank: bool = False  # whether some query row attends to no key of the piece
    first: bool = False  # whether no earlier piece has any of these query rows
    query_end: int = 0  # the position after that of the last query row

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)


def cut_slices(slices: Slices) -> list[Piece]:
    return slices.derived("pieces", lambda: _build_pieces(slices))


def additive_mask(
    piece: Piece, slices: Slices, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the additive mask of a piece, (n, m), and a mask of the rows without keys, (n,).

    A piece is a rectangle of n query rows and m key rows. The first mask is None if the piece has
    no `band`. The second mask is None if each row attends to some key.
    """
    if piece.band is None:
        return None, None
    visible = slices.mask(piece.rows, piece.keys, piece.band, device)
    mask = torch.full(visible.shape, -torch.inf, dtype=dtype, device=device)
    return mask.masked_fill_(visible, 0.0), ~visible.any(1) if piece.blank else None


def _build_pieces(slices: Slices) -> list[Piece]:
    pieces = [piece for i in range(len(slices)) for piece in _cut_slice(slices, i)]
    unmasked = sorted((x for x in pieces if not x.causal and x.band is None), key=lambda x: x[:3])
    result: list[Piece] = []
    for piece in unmasked:
        if result and result[-1][:2] == piece[:2] and result[-1].k_stop == piece.k_start:
            result[-1] = result[-1]._replace(k_stop=piece.k_stop)
        else:
            result.append(piece)
    result += [piece for piece in pieces if piece.causal or piece.band is not None]
    return _in_order(result, slices)


def _in_order(pieces: list[Piece], slices: Slices) -> list[Piece]:
    """Return the pieces with their fields `first` and `query_end` set.

    `pieces` are in the order in which they are computed.
    """
    begun, result = np.zeros(slices.query_rows, dtype=bool), list[Piece]()
    for piece in pieces:
        first, end = not begun[piece.rows].any(), int(slices.q_positions[piece.q_stop - 1]) + 1
        result.append(piece._replace(first=first, query_end=end))
        begun[piece.rows] = True
    return result


def _cut_slice(slices: Slices, i: int) -> list[Piece]:
    (q0, q1), (k0, k1) = slices.q_rows[i].tolist(), slices.k_rows[i].tolist()
    # Query row j attends to the key rows start[j] … stop[j] − 1.
    start, stop = slices.key_intervals(i)
    rows, keys = q1 - q0, k1 - k0
    base = int(stop[0]) - 1
    causal = base >= 0 and not start.any()  # a row without keys needs a mask
    if causal and (stop == np.minimum(base + 1 + np.arange(rows), keys)).all():
        return _cut_causal(q0, q1, k0, k1, base)
    if (runs := key_runs(start, stop)) is not None:
        return [Piece(a, b, c, d) for a, b, c, d in np.add(runs, [q0, q0, k0, k0]).tolist()]
    return _cut_tiles(q0, k0, start, stop, tuple(slices.bands[i].tolist()))


def key_runs(start: Ints, stop: Ints) -> Ints | None:
    """Return ranges of query rows that attend to the same keys, with these keys, as a table (r, 4).

    Row i attends to the keys start[i] … stop[i] − 1. Ranges without keys are left out. The result
    is None if a range has on average fewer than `_MIN_RUN_ROWS` rows.
    """
    edges = np.flatnonzero((np.diff(start) != 0) | (np.diff(stop) != 0)) + 1
    if stop.size < (edges.size + 1) * _MIN_RUN_ROWS:
        return None
    first = np.r_[0, edges]
    runs = np.stack([first, np.r_[edges, stop.size], start[first], stop[first]], 1)
    return runs[runs[:, 3] > runs[:, 2]]


def _cut_causal(q0: int, q1: int, k0: int, k1: int, base: int) -> list[Piece]:
    """Cut a causal mask into at most three rectangles for kernel calls.

    The mask has the query rows q0 … q1 − 1 and the key rows k0 … k1 − 1. The first row attends to
    the first `base` + 1 keys. Each row attends to one key more than the row before, until a row
    attends to all keys.
    """
    side = min(q1 - q0, k1 - k0 - base)
    if side == 1:  # a causal square with one row and one key is full
        return [Piece(q0, q1, k0, k0 + base + 1)]
    pieces = [
        Piece(q0, q0 + side, k0, k0 + base),
        Piece(q0, q0 + side, k0 + base, k0 + base + side, causal=True),
        Piece(q0 + side, q1, k0, k1),
    ]
    return [x for x in pieces if x.q_stop > x.q_start and x.k_stop > x.k_start]


def _cut_tiles(q0: int, k0: int, start: Ints, stop: Ints, band: tuple[int, ...]) -> list[Piece]:
    """Cut query rows and their keys into rectangles for kernel calls, most of which have an
    additive mask.

    Row i attends to the keys start[i] … stop[i] − 1. The rows are first cut into tiles of
    neighbouring rows. The keys to which all rows of a tile attend become a rectangle without a mask
    if there are many of them, because the kernel is faster without a mask.
    """
    tile = int(np.clip((stop - start).mean(), _MIN_TILE_ROWS, _MAX_TILE_ROWS))
    pieces: list[Piece] = []
    for a in range(0, start.size, tile):
        b = min(a + tile, start.size)
        seen_by_some = int(start[a]), int(stop[b - 1])
        seen_by_all = int(start[b - 1]), int(stop[a])
        masked = [seen_by_some]
        if seen_by_all[1] - seen_by_all[0] > 2 * tile:
            pieces.append(Piece(q0 + a, q0 + b, k0 + seen_by_all[0], k0 + seen_by_all[1]))
            masked = [(seen_by_some[0], seen_by_all[0]), (seen_by_all[1], seen_by_some[1])]
        for c, d in masked:
            if d > c:
                blank = bool((np.minimum(stop[a:b], d) <= np.maximum(start[a:b], c)).any())
                pieces.append(Piece(q0 + a, q0 + b, k0 + c, k0 + d, band=band, blank=blank))
    return pieces


# The rest of this file cuts pieces for ALiBi, whose bias is linear in the distance between query
# and key, and for a kernel that only accepts masks. Suppose that all keys of a piece are on one
# side of all of its queries. Each distance is then the sum of two distances: from the query to the
# nearest key of the piece, and from this key to the key. The first distance is the same for all
# keys of a row, so it only shifts the lse of the row. The mask therefore needs only one row for all
# queries, (Hq, 1, m). Other pieces need a mask (Hq, n, m). They lie around the diagonal and at the
# ends of windows. With tiles of 256 queries, they have 6% of the pairs of 8,192 causal tokens.


def cut_biased_slices(slices: Slices, score_rows: int) -> list[Piece]:
    """Return pieces for ALiBi, whose bias is added to the scores as a mask.

    `score_rows` is the number of rows of scores per query row: the batch size times the number of
    query heads.
    """

    def build() -> list[Piece]:
        count = range(len(slices))
        pieces = [piece for i in count for piece in _cut_biased_slice(slices, i, score_rows)]
        return _in_order(pieces, slices)

    return slices.derived(("biased pieces", score_rows), build)


def with_bias(
    mask: Tensor | None, piece: Piece, slices: Slices, slopes: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of a piece with ALiBi's bias, and numbers to subtract from lse, or None.

    A piece is a rectangle of n query rows and m key rows. If the piece has an additive mask (n, m),
    the bias is added to the mask. Without such a mask, the returned mask has the part of the bias
    that differs between keys, and the numbers (B or 1, n, Hq) are the part that is the same for all
    keys of a row. They are in fp64, because they can exceed a million. Without `slopes`, the mask
    is returned unchanged.
    """
    if slopes is None:
        return mask, None
    by_heads = slopes[:, :, None, None]
    if mask is not None:
        return mask - by_heads * distances(slices, piece.rows, piece.keys, slopes.device), None
    queries, positions = aligned_positions(slices, slopes.device)
    rows, keys = queries[piece.rows], positions[piece.keys]
    keys_are_ahead = int(slices.k_positions[piece.k_start]) > int(slices.aligned[piece.q_start])
    nearest = keys[0] if keys_are_ahead else keys[-1]
    shift = (rows - nearest).abs().double()[None, :, None] * slopes.double()[:, None]
    return -by_heads * (keys - nearest).abs(), shift


def _cut_biased_slice(slices: Slices, i: int, score_rows: int) -> list[Piece]:
    """Cut slice i into rectangles for kernel calls with ALiBi's bias.

    A slice is a range of query rows and a range of key rows. The rows are cut into tiles of
    neighbouring rows. The keys before all queries of a tile, and the keys after all queries of the
    tile, become rectangles whose masks have a single row. The remaining keys become rectangles
    whose masks have a row for each query.
    """
    (q0, q1), (k0, k1) = slices.q_rows[i].tolist(), slices.k_rows[i].tolist()
    start, stop = slices.key_intervals(i)
    queries, keys = slices.aligned[q0:q1], slices.k_positions[k0:k1]
    band, pieces = tuple(slices.bands[i].tolist()), list[Piece]()
    for a in range(0, q1 - q0, _BIASED_TILE_ROWS):
        b = min(a + _BIASED_TILE_ROWS, q1 - q0)
        first, end = int(start[a]), int(stop[b - 1])
        all_start, all_stop = int(start[b - 1]), int(stop[a])  # the keys to which all rows attend
        # Keys before `earlier` are at or before the positions of all queries. Keys from `later` on
        # are at or after the positions of all queries.
        earlier = int(np.searchsorted(keys, queries[a], side="right"))
        later = max(earlier, int(np.searchsorted(keys, queries[b - 1], side="left")))
        sides = [(all_start, min(all_stop, earlier)), (max(all_start, later), all_stop)]
        step = max(1, _MAX_BIASED_SCORES // (score_rows * (b - a)))
        masked_from = first
        for c, d in [*(x for x in sides if x[1] - x[0] >= _MIN_BIASED_KEYS), (end, end)]:
            for e in range(masked_from, c, step):
                f = min(e + step, c)
                blank = bool((np.minimum(stop[a:b], f) <= np.maximum(start[a:b], e)).any())
                pieces.append(Piece(q0 + a, q0 + b, k0 + e, k0 + f, band=band, blank=blank))
            if d > c:
                pieces.append(Piece(q0 + a, q0 + b, k0 + c, k0 + d))
            masked_from = d
    return pieces
