"""Refine a placement of documents on ranks by two kinds of steps.

*Levelling* moves tokens of cut documents from slower ranks to faster ranks. *Exchanging* moves a
whole document to a different rank, or swaps two whole documents of two ranks. A rank's *share* of a
document is the part of the document that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Pieces
from seqpar.balance.predict.prediction import Prediction, predict
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

MAX_SWEEPS = 24  # sweeps of levelling
MAX_STEPS = 512  # steps of exchanging, with one move or swap each
MAX_PEERS_PER_STEP = 4  # fast ranks tried per step
MAX_DOCUMENTS_PER_RANK = 64  # documents tried per rank and step
LEVEL_RATIO = 1.0001  # shares are not levelled if slowest rank / mean is below this
DONE_RATIO = 1.001  # the search ends if slowest rank / mean is below this


def refine(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> tuple[Pieces, Prediction]:
    """Change which rank holds which tokens, as long as the slowest rank gets faster: move tokens of
    cut documents, exchange whole documents, and move tokens of cut documents again.
    """
    for improve, enough in ((level, LEVEL_RATIO), (exchange, DONE_RATIO), (level, DONE_RATIO)):
        if found.seconds.max() <= enough * found.seconds.mean():
            break
        changed = improve(batch, pieces, found)
        if changed is pieces:
            continue
        after = predict(batch, changed)
        if after.seconds.max() < found.seconds.max():
            pieces, found = changed, after
    return pieces, found


def level(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> Pieces:
    """Move tokens of cut documents so that the ranks that hold tokens of one document take about
    the same time.

    No rank exceeds its capacity, and no rank's part of a document becomes smaller than
    `MIN_SHARE_TOKENS` tokens. Whole documents stay on their ranks.
    """
    # With a symmetric cut, a rank has equal numbers of tokens from the front and from the back of a
    # document. A token of the front and its mirror image in the back together have the same work
    # for all tokens, so ranks that share a document can be balanced to the token.
    cut = ~pieces.whole(batch)
    if not cut.any():
        return pieces
    documents, ranks, tokens = _shares(batch, pieces.take(cut))
    least, kept = np.minimum(tokens, MIN_SHARE_TOKENS), batch.kept[documents]
    each = (batch.weights / batch.lengths)[documents]  # seconds per token
    seconds, wanted = found.seconds.copy(), tokens.astype(np.float64)
    room = batch.capacity - pieces.held_by_rank(batch)
    number = np.unique(documents, return_inverse=True)[1]
    count = np.bincount(number)
    degree = np.bincount(ranks, minlength=batch.ranks)[ranks]
    # Each sweep moves tokens of all documents at once, from each document's slower ranks to its
    # faster ranks.
    for _ in range(MAX_SWEEPS):
        mine = seconds[ranks]
        mean = (np.bincount(number, mine) / count)[number]
        more = (mean - mine) / (each * degree)
        given, got = np.minimum(np.maximum(-more, 0), wanted - least), np.maximum(more, 0)
        inflow = np.bincount(ranks, got * kept, batch.ranks)
        got *= np.minimum(1, np.maximum(room, 0) / np.maximum(inflow, 1e-30))[ranks]
        sums = np.bincount(number, given), np.bincount(number, got)
        shares = [(np.minimum(*sums) / np.maximum(x, 1e-30))[number] for x in sums]
        change = got * shares[1] - given * shares[0]
        wanted += change
        seconds += np.bincount(ranks, change * each, batch.ranks)
        room -= np.bincount(ranks, change * kept, batch.ranks)
    whole = pieces.take(~cut)
    for unit in (2 * MIN_SHARE_TOKENS, 1):
        levelled = Pieces.joined([whole, _symmetric(batch, documents, ranks, wanted, unit)])
        if levelled.held_by_rank(batch).max() <= batch.capacity:
            return levelled
    return pieces


def _shares(batch: DocumentBatch, pieces: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return three arrays with one entry for each part of a document that one rank holds: the
    document, the rank and the number of tokens. The parts are sorted by document and position.
    """
    documents, ranks, share = pieces.shares(batch.ranks)
    tokens = np.bincount(share, pieces.stops - pieces.starts).astype(np.int64)
    begin = np.full(documents.size, np.iinfo(np.int64).max)
    np.minimum.at(begin, share, pieces.starts)
    order = np.lexsort((begin, documents))
    return documents[order], ranks[order], tokens[order]


def _symmetric(
    batch: DocumentBatch, documents: Ints, ranks: Ints, tokens: Floats, unit: int
) -> Pieces:
    """Cut each document into shares. Half of a share is taken from the front of the document, and
    the other half from its back.

    Share i has `tokens[i]` tokens. The shares of a document are consecutive in the arrays, and add
    up to the document's length. Each share is rounded to a multiple of `unit`, and the last share
    gets the remainder. A remainder of fewer than `MIN_SHARE_TOKENS` tokens is added to the previous
    share.
    """
    ends = np.cumsum(tokens)
    last = np.flatnonzero(np.diff(documents, append=-1))
    before = np.repeat(np.r_[0.0, ends[last[:-1]]], np.diff(last, prepend=-1))
    length = batch.lengths[documents]
    stops = np.rint((ends - before) / unit).astype(np.int64) * unit
    # Otherwise less than a tile would be left.
    stops[length - stops < min(unit, MIN_SHARE_TOKENS)] = 2**62
    stops[last] = 2**62
    stops = np.minimum(stops, length)
    starts = np.r_[0, stops[:-1]]
    starts[np.r_[0, last[:-1] + 1]] = 0
    low, high = starts // 2, stops // 2  # tokens from the front; the rest is from the back
    high = np.where(stops - starts == length, length, high)  # one piece for a whole document
    front = Pieces(documents, ranks, low, high)
    back = Pieces(documents, ranks, length - (stops - high), length - (starts - low))
    both = Pieces.joined([front, back])
    return both.take(both.stops > both.starts)


def exchange(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> Pieces:
    """Move or swap whole documents between ranks until the slowest rank is close to the mean.

    Returns `pieces` itself if no step makes the slowest rank faster.
    """
    seconds, ranks = found.seconds.copy(), pieces.ranks.copy()
    taken, room = pieces.held(batch), batch.capacity - pieces.held_by_rank(batch)
    weight = batch.weights[pieces.documents]
    whole = np.flatnonzero(pieces.whole(batch))
    whole = whole[np.lexsort((weight[whole], ranks[whole]))]
    edges = np.searchsorted(ranks[whole], np.arange(batch.ranks + 1))
    held: dict[int, Ints] = {}  # the documents of each rank that was tried
    enough = DONE_RATIO * float(seconds.mean())

    def of(rank: int) -> Ints:
        if rank not in held:
            held[rank] = whole[edges[rank] : edges[rank + 1]]
        return held[rank]

    # Each step moves a document from the slowest rank to one of the fastest, possibly in exchange
    # for another document, so that the times of the two ranks become as close as possible.
    for _ in range(MAX_STEPS):
        slow = int(seconds.argmax())
        if seconds[slow] <= enough or not of(slow).size:
            break
        for fast in _fastest(seconds):
            gap, rooms = float(seconds[slow] - seconds[fast]), (room[slow], room[fast])
            step = _step(_some(of(slow)), _some(of(fast)), weight, taken, gap, rooms)
            if step is not None:
                break
        else:
            break
        for given, source, to in ((step[0], slow, fast), (step[1], fast, slow)):
            if given >= 0:
                ranks[given] = to
                held[source] = held[source][held[source] != given]
                held[to] = np.append(held[to], given)
                seconds[source] -= weight[given]
                seconds[to] += weight[given]
                room[source] += taken[given]
                room[to] -= taken[given]
    return pieces if (ranks == pieces.ranks).all() else pieces._replace(ranks=ranks)


def _fastest(seconds: Floats) -> Iterator[int]:
    """Yield the fastest rank, and after it a few of the next fastest ranks."""
    yield int(seconds.argmin())
    peers = min(MAX_PEERS_PER_STEP, seconds.size)
    yield from seconds.argpartition(peers - 1)[:peers].tolist()


def _some(documents: Ints) -> Ints:
    """Return at most `MAX_DOCUMENTS_PER_RANK` of the documents. Documents of all lengths are
    chosen.
    """
    return documents[:: 1 + documents.size // MAX_DOCUMENTS_PER_RANK]


def _step(
    ones: Ints, twos: Ints, weight: Floats, taken: Floats, gap: float, room: tuple[float, float]
) -> tuple[int, int] | None:
    """Return the two documents to swap: one of the slower rank, and one of the faster rank.

    −1 stands for no document. `gap` is the difference between the seconds of the two ranks. The
    difference between the seconds of the two documents is as close as possible to half of `gap`,
    because a swap changes the gap by twice this difference. Returns None if no swap reduces the gap
    and fits on both ranks.
    """
    twos = np.append(twos, -1)
    values, sizes = weight[twos], taken[twos]
    values[-1] = sizes[-1] = 0.0
    off = np.abs(np.subtract.outer(weight[ones] - gap / 2, values))
    large = taken[ones]
    if large.max() > room[1] or sizes.max() > room[0]:
        more = np.subtract.outer(large, sizes)
        off[(more > room[1]) | (-more > room[0])] = np.inf
    i, j = divmod(int(off.argmin()), twos.size)
    return (int(ones[i]), int(twos[j])) if off[i, j] < gap / 2 * (1 - 1e-3) else None
