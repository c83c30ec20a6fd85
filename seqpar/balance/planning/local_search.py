"""Refine a placement by local search: move and swap whole documents off the slowest rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from seqpar.balance.planning.level_shares import level
from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.balance.predict.prediction import Prediction, predict
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

MAX_STEPS = 512
MAX_PEERS_PER_STEP = 4  # fast ranks tried per step
MAX_DOCUMENTS_PER_RANK = 64  # tried per step
LEVEL_RATIO = 1.0001  # slowest rank / mean, below which shares are not levelled
DONE_RATIO = 1.001  # slowest rank / mean, below which the search ends


def refine(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> tuple[Pieces, Prediction]:
    """Return pieces, levelled, exchanged and levelled again while the slowest rank gets faster."""
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


def exchange(batch: DocumentBatch, pieces: Pieces, found: Prediction) -> Pieces:
    """Move or swap whole documents between ranks until the slowest rank is close to the mean.

    Each step moves a document from the slowest rank to one of the fastest, possibly in exchange for
    another, so that the two come as close as possible. Returns `pieces` itself if no step helps.
    """
    seconds, ranks = found.seconds.copy(), pieces.ranks.copy()
    taken = (pieces.stops - pieces.starts) * batch.kept[pieces.documents]
    room = batch.capacity - np.bincount(ranks, taken, batch.ranks)
    weight = batch.weights[pieces.documents]
    whole = np.flatnonzero(pieces.whole(batch))
    whole = whole[np.lexsort((weight[whole], ranks[whole]))]
    edges = np.searchsorted(ranks[whole], np.arange(batch.ranks + 1))
    held: dict[int, Ints] = {}  # by rank; filled when a rank is first tried
    enough = DONE_RATIO * float(seconds.mean())

    def of(rank: int) -> Ints:
        if rank not in held:
            held[rank] = whole[edges[rank] : edges[rank + 1]]
        return held[rank]

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
    """Yield the fastest rank, then a few of the fastest, which are rarely needed."""
    yield int(seconds.argmin())
    peers = min(MAX_PEERS_PER_STEP, seconds.size)
    yield from seconds.argpartition(peers - 1)[:peers].tolist()


def _some(documents: Ints) -> Ints:
    """Return at most `MAX_DOCUMENTS_PER_RANK` of the documents, spread over all sizes."""
    return documents[:: 1 + documents.size // MAX_DOCUMENTS_PER_RANK]


def _step(
    ones: Ints, twos: Ints, weight: Floats, taken: Floats, gap: float, room: tuple[float, float]
) -> tuple[int, int] | None:
    """Return a document of the slower rank and one of the faster to swap; −1 stands for none.

    Their seconds differ by as close to half of `gap` as possible. Returns None if no swap with room
    on both ranks reduces the gap.
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
