"""Balance ranks by changing their shares of cut documents.

A symmetric cut gives a rank the same number of tokens from a document's front and back. Each such
pair has the same work, so ranks that share a document can be balanced to the token.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Pieces
from seqpar.balance.predict.prediction import Prediction
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

MAX_SWEEPS = 24


def level(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> Pieces:
    """Return pieces in which the ranks that share documents have more nearly equal seconds.

    In each sweep all documents simultaneously move tokens from their slower to their faster ranks.
    No rank exceeds its capacity, or gets a share of less than a tile. Whole documents stay.
    """
    cut = ~pieces.whole(batch)
    if not cut.any():
        return pieces
    shared = Pieces(*(column[cut] for column in pieces))
    documents, ranks, tokens = _shares(batch, shared)
    least, kept = np.minimum(tokens, MIN_SHARE_TOKENS), batch.kept[documents]
    each = (batch.weights / batch.lengths)[documents]  # seconds per token
    seconds, wanted = found.seconds.copy(), tokens.astype(np.float64)
    taken = (pieces.stops - pieces.starts) * batch.kept[pieces.documents]
    room = batch.capacity - np.bincount(pieces.ranks, taken, batch.ranks)
    number = np.unique(documents, return_inverse=True)[1]
    count = np.bincount(number)
    degree = np.bincount(ranks, minlength=batch.ranks)[ranks]
    for _ in range(MAX_SWEEPS):
        mine = seconds[ranks]
        mean = (np.bincount(number, mine) / count)[number]
        more = (mean - mine) / (each * degree)
        given, got = np.minimum(np.maximum(-more, 0), wanted - least), np.maximum(more, 0)
        inflow = np.bincount(ranks, got * kept, batch.ranks)
        got *= np.minimum(1, np.maximum(room, 0) / np.maximum(inflow, 1e-30))[ranks]
        sums = np.bincount(number, given), np.bincount(number, got)
        moved = np.minimum(*sums)
        change = (got * (moved / np.maximum(sums[1], 1e-30))[number]) - (
            given * (moved / np.maximum(sums[0], 1e-30))[number]
        )
        wanted += change
        seconds += np.bincount(ranks, change * each, batch.ranks)
        room -= np.bincount(ranks, change * kept, batch.ranks)
    whole = Pieces(*(column[~cut] for column in pieces))
    for unit in (2 * MIN_SHARE_TOKENS, 1):
        levelled = Pieces.joined([whole, _symmetric(batch, documents, ranks, wanted, unit)])
        taken = (levelled.stops - levelled.starts) * batch.kept[levelled.documents]
        if np.bincount(levelled.ranks, taken).max() <= batch.capacity:
            return levelled
    return pieces


def _shares(batch: DocumentBatch, pieces: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return documents, ranks and tokens of all shares, by document and position."""
    key = pieces.documents * batch.ranks + pieces.ranks
    found, share = np.unique(key, return_inverse=True)
    tokens = np.bincount(share, pieces.stops - pieces.starts).astype(np.int64)
    begin = np.full(found.size, np.iinfo(np.int64).max)
    np.minimum.at(begin, share, pieces.starts)
    documents, ranks = np.divmod(found, batch.ranks)
    order = np.lexsort((begin, documents))
    return documents[order], ranks[order], tokens[order]


def _symmetric(
    batch: DocumentBatch, documents: Ints, ranks: Ints, tokens: Floats, unit: int
) -> Pieces:
    """Cut each document into shares of `tokens` tokens, half from its front and half from its back.

    A document's shares follow one another and sum to its length. They are multiples of `unit`,
    except for the remainder; a remainder of less than a tile goes to the rank before.
    """
    ends = np.cumsum(tokens)
    last = np.flatnonzero(np.diff(documents, append=-1))
    before = np.repeat(np.r_[0.0, ends[last[:-1]]], np.diff(last, prepend=-1))
    length = batch.lengths[documents]
    stops = np.rint((ends - before) / unit).astype(np.int64) * unit
    stops[length - stops < min(unit, MIN_SHARE_TOKENS)] = 2**62  # less than a tile would be left
    stops[last] = 2**62
    stops = np.minimum(stops, length)
    starts = np.r_[0, stops[:-1]]
    starts[np.r_[0, last[:-1] + 1]] = 0
    low, high = starts // 2, stops // 2  # tokens from the front; the rest is from the back
    high = np.where(stops - starts == length, length, high)  # one piece if whole
    front = Pieces(documents, ranks, low, high)
    back = Pieces(documents, ranks, length - (stops - high), length - (starts - low))
    both = Pieces.joined([front, back])
    filled = both.stops > both.starts
    return Pieces(*(column[filled] for column in both))
