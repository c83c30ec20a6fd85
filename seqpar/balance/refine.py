"""Refine a placement by local search: move and swap whole documents off the slowest rank."""

from __future__ import annotations

import numpy as np

from seqpar.arguments import Ints
from seqpar.balance.batch import Batch, Pieces
from seqpar.balance.predict import Prediction
from seqpar.costs.grid import Floats

STEPS = 512  # at most, and PEERS ranks tried in each
PEERS = 4
CLOSE = 1.001  # of the mean: balanced enough


def refine(batch: Batch, pieces: Pieces, found: Prediction) -> Pieces:
    """Return pieces with some whole documents on other ranks, so that the slowest rank is faster.

    In each step the slowest rank gives one of the fastest a document, or swaps two with it, such
    that their seconds come closest. It ends where no step helps.
    """
    seconds, ranks = found.seconds.copy(), pieces.ranks.copy()
    taken = (pieces.stops - pieces.starts) * batch.kept[pieces.documents]
    tokens = np.bincount(ranks, taken, batch.ranks)
    whole = np.flatnonzero(pieces.whole(batch))
    weight = batch.weights[pieces.documents]
    held = np.split(
        whole[np.argsort(ranks[whole], kind="stable")],
        np.cumsum(np.bincount(ranks[whole], minlength=batch.ranks))[:-1],
    )
    peers = min(PEERS, batch.ranks)
    for _ in range(STEPS):
        slow = int(np.argmax(seconds))
        if seconds[slow] <= CLOSE * seconds.mean() or not held[slow].size:
            break
        for fast in np.argpartition(seconds, peers - 1)[:peers].tolist():
            step = _step(
                held[slow], held[fast], weight, taken, float(seconds[slow] - seconds[fast]),
                (batch.capacity - float(tokens[slow]), batch.capacity - float(tokens[fast])),
            )  # fmt: skip
            if step is not None:
                break
        else:
            break
        one, two = step
        for given, source, to in ((one, slow, fast), (two, fast, slow)):
            if given >= 0:
                ranks[given] = to
                held[source] = held[source][held[source] != given]
                held[to] = np.r_[held[to], given]
                seconds[[source, to]] += weight[given] * np.array([-1, 1])
                tokens[[source, to]] += taken[given] * np.array([-1, 1])
    return pieces._replace(ranks=ranks)


def _step(
    ones: Ints, twos: Ints, weight: Floats, taken: Floats, gap: float, room: tuple[float, float]
) -> tuple[int, int] | None:
    """Return a document of the slower rank and one of the faster, or −1 for none, to be swapped.

    Their difference comes closest to half of the gap. Return None if none is between 0 and the gap,
    or there is no room for what is.
    """
    twos = twos[np.argsort(weight[twos], kind="stable")]
    values, sizes = np.r_[0.0, weight[twos]], np.r_[0.0, taken[twos]]
    index = np.searchsorted(values, weight[ones] - gap / 2)
    best, least = None, gap / 2 * (1 - 1e-3)
    for near in (np.maximum(index - 1, 0), np.minimum(index, values.size - 1)):
        off = np.abs(weight[ones] - values[near] - gap / 2)
        more = taken[ones] - sizes[near]
        off[(more > room[1]) | (-more > room[0])] = np.inf
        i = int(np.argmin(off))
        if off[i] < least:
            least = float(off[i])
            best = int(ones[i]), int(twos[near[i] - 1]) if near[i] else -1
    return best
