"""Cut slices into pieces for a bias that is linear in distance, with kernels that take masks only.

Where all keys of a piece lie on one side of all of its queries, the distance is that of the query
from the piece's nearest key, plus that of the key from it. The first is the same for all keys of a
row: it shifts the row's lse alone. So the mask has one row for all queries, (Hq, 1, m), in place of
one for each, (Hq, n, m), which only pieces around the diagonal and at cut edges need.

Legend: B batch, Hq query heads, n query rows, m key rows.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends.pieces import Piece, WorkSplit, numbered
from seqpar.softmax.compute.alibi import aligned_positions, distances

_TILE = 256  # query rows; masks of the diagonal's pieces take time that grows with it
_LEAST_KEYS = 64  # of a piece with one row of mask
_MAX_SCORES = 2**24  # of a piece with a mask for each row


def all_biased(slices: Slices, score_rows: int) -> WorkSplit:
    """Split the work for such a kernel, where a query row has so many rows of scores."""

    def build() -> list[Piece]:
        pieces = [
            piece for i in range(len(slices)) for piece in _lower_slice(slices, i, score_rows)
        ]
        return numbered(pieces, slices)

    return WorkSplit(slices.derived(("biased pieces", score_rows), build), None)


def with_bias(
    mask: Tensor | None, piece: Piece, slices: Slices, slopes: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return a piece's additive mask (n, m), if it has one, with the bias of slopes (B or 1, Hq).

    It is then (B or 1, Hq, n or 1, m). Return also, (B or 1, n, Hq) fp64, what has to be subtracted
    from the lse of each row, or None if nothing has to be.
    """
    if slopes is None:
        return mask, None
    by_heads = slopes[:, :, None, None]
    if mask is not None:
        return mask - by_heads * distances(slices, piece.rows, piece.keys, slopes.device), None
    queries, positions = aligned_positions(slices, slopes.device)
    rows, keys = queries[piece.rows], positions[piece.keys]
    ahead = int(slices.k_positions[piece.k_start]) > int(slices.aligned[piece.q_start])
    nearest = keys[0] if ahead else keys[-1]
    shift = (rows - nearest).abs().double()[None, :, None] * slopes.double()[:, None]
    return -by_heads * (keys - nearest).abs(), shift


def _lower_slice(slices: Slices, i: int, score_rows: int) -> list[Piece]:
    """Cut a slice into tiles of query rows, and each of these by the side on which its keys lie."""
    (q0, q1), (k0, k1) = slices.q_rows[i].tolist(), slices.k_rows[i].tolist()
    start, stop = slices.key_intervals(i)
    queries, keys = slices.aligned[q0:q1], slices.k_positions[k0:k1]
    band, pieces = tuple(slices.bands[i].tolist()), list[Piece]()
    for a in range(0, q1 - q0, _TILE):
        b = min(a + _TILE, q1 - q0)
        first, end = int(start[a]), int(stop[b - 1])
        # The keys that all rows see, behind all rows or beside the first; and ahead of all.
        seen_by_all = int(start[b - 1]), int(stop[a])
        behind = int(np.searchsorted(keys, queries[a], side="right"))
        ahead = max(behind, int(np.searchsorted(keys, queries[b - 1], side="left")))
        sides = [
            (seen_by_all[0], min(seen_by_all[1], behind)),
            (max(seen_by_all[0], ahead), seen_by_all[1]),
        ]
        step = max(1, _MAX_SCORES // (score_rows * (b - a)))
        reached = first
        for c, d in [*(side for side in sides if side[1] - side[0] >= _LEAST_KEYS), (end, end)]:
            for e in range(reached, c, step):
                f = min(e + step, c)
                blank = bool((np.minimum(stop[a:b], f) <= np.maximum(start[a:b], e)).any())
                pieces.append(Piece(q0 + a, q0 + b, k0 + e, k0 + f, band=band, blank=blank))
            if d > c:
                pieces.append(Piece(q0 + a, q0 + b, k0 + c, k0 + d))
            reached = d
    return pieces
