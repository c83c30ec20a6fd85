"""Choose which rank holds which tokens, for balanced attention and few messages.

The *home* of a token is the rank that holds it. Under a causal mask, the last rows of a document
have the most work per token. If the last rows are cut off, the remaining rows are again a complete,
shorter document. A document with more work than the mean work of a rank is therefore cut from its
end: the last rows are placed on one rank, the rows before them on the next rank, and so on, until
the remaining rows have at most the mean work of a rank. Short documents are then added until all
ranks have equal numbers of tokens. With this layout, no queries and few keys are sent.
"""

from __future__ import annotations

import heapq

import numpy as np

from seqpar.balance.disaggregation.disaggregate import TILE_ROWS
from seqpar.balance.disaggregation.row_bytes import RowBytes, check_row_bytes
from seqpar.core.arguments import CuSeqlens, Ints, as_float, as_int, as_lengths, as_ranks
from seqpar.core.compiling import outside_graphs
from seqpar.costs.grid import Floats
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.layout import Layout

# Fractions by which the number of tokens of a rank can exceed the mean. `place_homes` uses the
# first one that leaves enough memory for keys.
SLACKS = (0.0, 0.01, 0.02, 0.03, 0.05)


@outside_graphs
def place_homes(
    lengths: CuSeqlens,
    ranks: int,
    *,
    row_bytes: RowBytes,
    token_bytes: float | None = None,
    tolerance: float = 0.05,
    tile: int = TILE_ROWS,
) -> Layout:
    """Return a layout whose causal attention is balanced over the ranks and sends few keys.

    No rank has much more work, memory or tokens than the mean, unless the documents make such a
    layout impossible. `disaggregate` can balance the remaining differences in work. The same
    arguments give the same layout. Raises a ValueError that names a wrong argument.

    Args:
        lengths: (documents,) the number of tokens of each document.
        ranks: the number of ranks.
        row_bytes: bytes of a row of queries and of keys.
        token_bytes: the bytes that a rank keeps for each of its tokens in a layer. By default,
            these are the token's rows.
        tolerance: the fraction by which a rank's work and bytes can exceed the mean. If keys from
            other ranks take too much memory on a rank, the rank gets up to 5% fewer tokens.
        tile: documents are cut at multiples of this number of tokens.
    """
    lengths, ranks = as_lengths("lengths", lengths), as_ranks("ranks", ranks)
    row_bytes = check_row_bytes(row_bytes)
    tolerance, tile = as_float("tolerance", tolerance), as_int("tile", tile, 1)
    if not 0 <= tolerance < np.inf:
        raise ValueError(f"tolerance must be at least 0 and finite, got {tolerance}")
    token = float(sum(row_bytes)) if token_bytes is None else as_float("token_bytes", token_bytes)
    if not 0 < token < np.inf:
        raise ValueError(f"token_bytes must be positive and finite, got {token}")
    mean, most = lengths.sum() / ranks, np.inf
    for slack in SLACKS:
        placing = _Placing(lengths, ranks, row_bytes.key, token, tolerance, tile)
        placing.place(int(np.ceil(mean * (1 + slack))), most)
        used = placing.tokens * token + placing.received
        most = (1 + tolerance) * used.mean()
        if used.max(initial=0.0) <= most:
            break
    table = np.array(placing.pieces, np.int64).reshape(-1, 4).T
    return Layout(np.r_[0, np.cumsum(lengths)], Spans.of(ranks, *table))


class _Placing:
    """Documents that are to be placed, and the work, tokens and bytes that each rank can still
    receive.
    """

    def __init__(
        self, lengths: Ints, ranks: int, key: float, token: float, tolerance: float, tile: int
    ) -> None:
        self.lengths, self.key, self.token, self.tile = lengths, key, token, tile
        work = lengths * (lengths + 1) / 2
        mean = work.sum() / ranks
        self.time = np.full(ranks, mean * (1 + tolerance))
        self.tokens, self.received = np.zeros(ranks, np.int64), np.zeros(ranks)
        # Documents are called light if they have less work per token than the average of all
        # tokens.
        self.light = int(2 * mean * ranks / max(lengths.sum(), 1))
        light = lengths < self.light
        self.light_work, self.light_tokens = float(work[light].sum()), float(lengths[light].sum())
        self.pieces: list[tuple[int, int, int, int]] = []  # rank, document, start and stop

    def place(self, most_tokens: int, most_bytes: float) -> None:
        """Place all documents, longest first. If only the end of a document was placed, the rest is
        placed like a separate document.
        """
        left = [(-length, i) for i, length in enumerate(self.lengths.tolist()) if length]
        heapq.heapify(left)
        while left:
            length, document = -left[0][0], left[0][1]
            room = (most_tokens - self.tokens).astype(np.float64)
            with_keys = np.minimum(room, (most_bytes - self.received) / self.token - self.tokens)
            # If no rank has memory left, the document is placed nevertheless.
            if with_keys.max() >= self.tile:
                room = with_keys
            rank, start = self._choose(length, room)
            self.pieces.append((rank, document, start, length))
            self.time[rank] -= (length * (length + 1) - start * (start + 1)) / 2
            self.tokens[rank] += length - start
            self.received[rank] += start * self.key
            if length < self.light:
                self._count(length, -1)
            if start:
                if start < self.light:
                    self._count(start, 1)
                heapq.heapreplace(left, (-start, document))
            else:
                heapq.heappop(left)

    def _count(self, length: int, sign: int) -> None:
        self.light_work += sign * length * (length + 1) / 2
        self.light_tokens += sign * length

    def _choose(self, length: int, room: Floats) -> tuple[int, int]:
        """Choose the rank on which a document, or only the end of a document, is placed.

        The chosen rank is usually the rank with the most free time. Time that is reserved for
        documents with less work per token than the average does not count as free.

        Returns the rank, and the position of the document from which on tokens are placed on the
        rank.
        """
        density = self.light_work / max(self.light_tokens, 1.0)
        spare = self.time - density * np.maximum(room, 0.0)
        whole = np.where(room >= length, spare, -np.inf)
        rank, light = int(whole.argmax()), length < self.light
        # The document's work minus the work of equally many tokens of light documents.
        more = length * (length + 1) / 2 - density * length
        if room[rank] >= length and (light or more <= spare[rank]):
            return rank, 0
        rank, start = int((room if light else spare).argmax()), 0.0
        if not light:  # (length² − start²)/2 − density·(length − start) = spare
            square = density * density + 2 * (more - max(spare[rank], 0.0))
            start = density + np.sqrt(max(square, 0.0))
        if room[rank] < length:
            start = max(start, length - float(room[rank]))
        start = -(-start // self.tile) * self.tile
        return rank, int(start) if start < length else (length - 1) // self.tile * self.tile
