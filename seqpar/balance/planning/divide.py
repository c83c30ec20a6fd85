"""Divide documents between micro-batches: the fewest that hold them, or a given number."""

from __future__ import annotations

import heapq
import math

import numpy as np

from seqpar.balance.predict.batch import DocumentBatch
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats


def as_few(batch: DocumentBatch) -> list[Ints]:
    """Divide documents between the fewest micro-batches that hold them, as far as they pack well.

    They are assigned longest first, back and forth over the micro-batches. Those that do not fit go
    to the micro-batch with the fewest tokens, or to an additional one.
    """
    most, lengths, held = batch.room, batch.lengths, batch.held
    count = math.ceil(held.sum() / most)
    turn, place = np.divmod(np.arange(lengths.size), max(count, 1))
    bins = np.where(turn % 2 == 0, place, count - 1 - place)
    found, late = [], []
    for number in range(count):
        documents = batch.longest_first[bins == number]
        fits = np.cumsum(held[documents]) <= most
        found.append(documents[fits])
        late += documents[~fits].tolist()
    tokens = [float(held[documents].sum()) for documents in found]
    more: list[list[int]] = [[] for _ in found]
    for document in sorted(late, key=lambda i: (-int(lengths[i]), i)):
        taken = float(held[document])
        number = min(range(len(tokens)), key=tokens.__getitem__)
        if tokens[number] + taken > most:
            number = len(tokens)
            tokens.append(0.0)
            more.append([])
            found.append(np.zeros(0, np.int64))
        tokens[number] += taken
        more[number].append(document)
    return [np.r_[one, np.array(two, np.int64)] for one, two in zip(found, more, strict=True)]


def even(batch: DocumentBatch, count: int) -> list[Ints]:
    """Divide documents between `count` micro-batches that take about equally long.

    As for pipelines in "ByteScale" (2025), section 5, every micro-batch has documents of all
    lengths: each document, most work first, goes to the micro-batch with the least work that has
    room. None exceeds the mean by more than a short document's work, unless a single document does.

    Raise a ValueError that names `micro_batches` if they do not hold all documents.
    """
    order = np.argsort(-batch.weights, kind="stable")
    found = to_lightest(batch.held[order], batch.weights[order], count, batch.room)
    if found is None:
        needed = math.ceil(batch.held.sum() / batch.room)
        raise ValueError(
            f"micro_batches must be more than {count}: documents find no room in so many, and "
            f"have tokens for {needed}"
        )
    by_number = np.lexsort((order, found))
    return np.split(order[by_number], np.searchsorted(found[by_number], np.arange(1, count)))


def to_lightest(tokens: Ints | Floats, weights: Floats, count: int, room: float) -> Ints | None:
    """Give each item, in order, to the lightest of `count` bins that has room for its tokens.

    Return the number of each item's bin, or None if an item finds no room.
    """
    lightest, held = [(0.0, number) for number in range(count)], [0.0] * count
    found = np.empty(weights.size, np.int64)
    for i, (taken, weight) in enumerate(zip(tokens.tolist(), weights.tolist(), strict=True)):
        full = []
        while lightest and held[lightest[0][1]] + taken > room:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        work, number = lightest[0]
        heapq.heapreplace(lightest, (work + weight, number))
        for entry in full:
            heapq.heappush(lightest, entry)
        held[number] += taken
        found[i] = number
    return found
