"""Cut slices into the pieces that fused kernels compute: rectangles of query rows × key rows.

A kernel computes a full rectangle of scores, a causal square, or a rectangle under an additive
mask. Pieces are ranges of rows, not of positions: counted in rows, a causal mask over the tokens of
one run is one causal square, whatever the layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices

# Query rows of a masked tile: from 768 on, ATen's CPU kernel takes its largest blocks.
_MIN_TILE, _MAX_TILE = 64, 768
_LONG_STEP = 256  # rows that see the same keys are a piece without a mask, if so many on average


class Piece(NamedTuple):
    """Query rows × key rows: full, a causal square, or masked by a band of k_pos − q_pos."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    band: tuple[int, ...] | None = None  # lo and hi
    blank: bool = False  # whether a query row sees none of its keys
    first: bool = False  # whether no earlier piece has any of its query rows
    query_end: int = 0  # the position behind that of its last query row

    @property
    def rows(self) -> slice:
        """The query rows."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """The key rows."""
        return slice(self.k_start, self.k_stop)


class WorkSplit(NamedTuple):
    """What a fused kernel computes, and what is left to plain PyTorch, if anything is."""

    fused: list[Piece]
    plain: Slices | None


def all_fused(slices: Slices) -> WorkSplit:
    """Split the work for a kernel that computes every piece."""
    return WorkSplit(_pieces(slices), None)


def all_plain(slices: Slices) -> WorkSplit:
    """Split the work for a kernel that computes none of it."""
    return WorkSplit([], slices)


def unmasked_fused(slices: Slices) -> WorkSplit:
    """Split the work for a kernel without masks: it computes the full and causal pieces."""

    def build() -> WorkSplit:
        pieces = _pieces(slices)
        masked = [piece for piece in pieces if piece.band is not None]
        unmasked = [piece for piece in pieces if piece.band is None]
        return WorkSplit(unmasked, _slices_of(masked, slices) if masked else None)

    return slices.derived("unmasked pieces", build)


def additive_mask(
    piece: Piece, slices: Slices, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return a piece's additive mask (n, m), and which of its rows (n,) see none of its keys.

    Either is None where the piece has none.
    """
    if piece.band is None:
        return None, None
    visible = slices.mask(piece.rows, piece.keys, piece.band, device)
    mask = torch.full(visible.shape, -torch.inf, dtype=dtype, device=device)
    return mask.masked_fill_(visible, 0.0), ~visible.any(1) if piece.blank else None


def _pieces(slices: Slices) -> list[Piece]:
    """Return the pieces that make up the slices; they are kept with the slices."""
    return slices.derived("pieces", lambda: _lower(slices))


def _lower(slices: Slices) -> list[Piece]:
    """Cut every slice, and join full pieces of the same rows over adjacent keys."""
    pieces = [piece for i in range(len(slices)) for piece in _lower_slice(slices, i)]
    unmasked = sorted((x for x in pieces if not x.causal and x.band is None), key=lambda x: x[:3])
    result: list[Piece] = []
    for piece in unmasked:
        if result and result[-1][:2] == piece[:2] and result[-1].k_stop == piece.k_start:
            result[-1] = result[-1]._replace(k_stop=piece.k_stop)
        else:
            result.append(piece)
    result += [piece for piece in pieces if piece.causal or piece.band is not None]
    return numbered(result, slices)


def numbered(pieces: list[Piece], slices: Slices) -> list[Piece]:
    """Return pieces, in the order in which they are computed, with `first` and `query_end`."""
    begun, result = np.zeros(slices.query_rows, dtype=bool), list[Piece]()
    for piece in pieces:
        first, end = not begun[piece.rows].any(), int(slices.q_positions[piece.q_stop - 1]) + 1
        result.append(piece._replace(first=first, query_end=end))
        begun[piece.rows] = True
    return result


def _lower_slice(slices: Slices, i: int) -> list[Piece]:
    """Cut a slice, given the interval [start, stop) of its key rows that each query row sees."""
    (q0, q1), (k0, k1) = slices.q_rows[i].tolist(), slices.k_rows[i].tolist()
    start, stop = slices.key_intervals(i)
    rows, keys = q1 - q0, k1 - k0
    base = int(stop[0]) - 1
    causal = base >= 0 and not start.any()  # a row that sees no key is for tiles
    if causal and (stop == np.minimum(base + 1 + np.arange(rows), keys)).all():
        return _lower_causal(q0, q1, k0, k1, base)
    edges = np.flatnonzero((np.diff(start) != 0) | (np.diff(stop) != 0)) + 1
    if rows >= (edges.size + 1) * _LONG_STEP:
        first_rows, stop_rows = np.r_[0, edges], np.r_[edges, rows]
        steps = zip(first_rows, stop_rows, start[first_rows], stop[first_rows], strict=True)
        return [
            Piece(int(q0 + a), int(q0 + b), int(k0 + c), int(k0 + d))
            for a, b, c, d in steps
            if d > c
        ]
    return _lower_tiles(q0, k0, start, stop, tuple(slices.bands[i].tolist()))


def _lower_causal(q0: int, q1: int, k0: int, k1: int, base: int) -> list[Piece]:
    """Cut a slice whose rows each see one key more than the row before, until they see all.

    Its first row sees `base` + 1 keys.
    """
    side = min(q1 - q0, k1 - k0 - base)
    if side == 1:  # a causal square of one pair is full
        return [Piece(q0, q1, k0, k0 + base + 1)]
    pieces = [
        Piece(q0, q0 + side, k0, k0 + base),
        Piece(q0, q0 + side, k0 + base, k0 + base + side, causal=True),
        Piece(q0 + side, q1, k0, k1),
    ]
    return [x for x in pieces if x.q_stop > x.q_start and x.k_stop > x.k_start]


def _lower_tiles(q0: int, k0: int, start: Ints, stop: Ints, band: tuple[int, ...]) -> list[Piece]:
    """Cut a slice into tiles, each with an additive mask.

    Row i sees keys start[i] … stop[i] − 1. The keys that all rows of a tile see become a piece
    without a mask, if they are many: kernels are faster without one.
    """
    tile = int(np.clip((stop - start).mean(), _MIN_TILE, _MAX_TILE))
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


def _slices_of(masked: list[Piece], slices: Slices) -> Slices:
    """Return masked pieces as slices."""
    rows = [(*piece[:4], *(piece.band or ())) for piece in masked]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3, 2)
    q_rows, k_rows, bands = table.swapaxes(0, 1)
    return replace(slices, q_rows=q_rows, k_rows=k_rows, bands=bands, derived=Memo())
