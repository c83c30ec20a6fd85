"""Divide an epoch into steps, and the documents of a step into micro-batches."""

from __future__ import annotations

import heapq
import math

import numpy as np

from seqpar.balance.predict.batch import DocumentBatch
from seqpar.core.arguments import Ints
from seqpar.core.ranges import mix
from seqpar.costs.grid import Floats


def as_few(batch: DocumentBatch) -> list[Ints]:
    """Divide documents into as few micro-batches as a fast heuristic finds, which is not always the
    smallest possible number.
    """
    # Documents are assigned to micro-batches longest first, in alternating direction. A document
    # that does not fit is added to the micro-batch with the fewest tokens, or to an additional
    # micro-batch.
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
    """Divide documents into `count` micro-batches that take about the same time.

    Documents are sorted by work, and the document with the most work is placed first. Each document
    is placed in the micro-batch that has the least work among the micro-batches that can still hold
    the document. Every micro-batch therefore has documents of all lengths, as for pipelines in
    "ByteScale" (2025), section 5. Unless a single document has more work than the mean, no
    micro-batch exceeds the mean by more than the work of a short document.

    Raises a ValueError that names `micro_batches` if `count` micro-batches cannot hold all
    documents.
    """
    order = np.argsort(-batch.weights, kind="stable")
    found = to_lightest(batch.held[order], batch.weights[order], count, batch.room)
    if found is None:
        needed = math.ceil(batch.held.sum() / batch.room)
        raise ValueError(
            f"micro_batches must be more than {count}, into which the documents do not fit: even "
            f"without gaps, their tokens fill {needed}"
        )
    by_number = np.lexsort((order, found))
    return np.split(order[by_number], np.searchsorted(found[by_number], np.arange(1, count)))


def to_lightest(tokens: Ints | Floats, weights: Floats, count: int, room: float) -> Ints | None:
    """Put each item into the bin with the least weight among the bins that have room.

    Returns the bin of each item, or None if an item fits into none of the `count` bins.
    """
    lightest, held = [(0.0, number) for number in range(count)], [0.0] * count
    # A heap of bins that had no room for an item, by their tokens.
    full: list[tuple[float, float, int]] = []
    found = np.empty(weights.size, np.int64)
    for i, (taken, weight) in enumerate(zip(tokens.tolist(), weights.tolist(), strict=True)):
        while full and full[0][0] + taken <= room:
            heapq.heappush(lightest, heapq.heappop(full)[1:])
        while lightest and held[lightest[0][1]] + taken > room:
            work, number = heapq.heappop(lightest)
            heapq.heappush(full, (held[number], work, number))
        if not lightest:
            return None
        work, number = lightest[0]
        heapq.heapreplace(lightest, (work + weight, number))
        held[number] += taken
        found[i] = number
    return found


def in_order(lengths: Ints, most: int) -> list[Ints]:
    """Divide documents, in order, into few parts of at most `most` tokens.

    A document with more than `most` tokens is alone in a part.
    """
    parts, first, ends = [], 0, np.cumsum(lengths)
    while first < lengths.size:
        before = int(ends[first] - lengths[first])
        stop = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        parts.append(np.arange(first, stop))
        first = stop
    return parts


def steps_of_epoch(
    lengths: Ints, tokens: int, seed: int, epoch: int, deferral: int = 0
) -> list[Ints]:
    """Return the documents of each step of an epoch: all documents once, in random order.

    Each step takes the next documents in this order, until the following document would exceed
    `tokens` tokens. If `deferral` is above 0, the documents of `deferral` + 1 consecutive steps are
    afterwards distributed evenly over these steps. Documents are sorted by hashes, so that the
    order is the same with every version of numpy.
    """
    of_epoch = int(mix(np.array([epoch]), seed)[0])
    order = np.argsort(mix(np.arange(lengths.size), of_epoch), kind="stable")
    steps = [order[part] for part in in_order(lengths[order], tokens)]
    if not deferral:
        return steps
    windows = (steps[i : i + deferral + 1] for i in range(0, len(steps), deferral + 1))
    return [step for window in windows for step in _dealt(lengths, window, tokens)]


def _dealt(lengths: Ints, steps: list[Ints], tokens: int) -> list[Ints]:
    """Reassign the documents of steps, longest first, each to the step with the least work."""
    documents = np.concatenate(steps)
    documents = documents[np.argsort(-lengths[documents], kind="stable")]
    size = lengths[documents].astype(np.float64)
    # A document's work is its fraction of all tokens plus its fraction of all squared lengths.
    work = size / size.sum() + np.square(size) / np.square(size).sum()
    found = to_lightest(lengths[documents], work, len(steps), tokens)
    if found is None:  # a document did not fit, so the steps stay unchanged
        return steps
    return [documents[found == number] for number in range(len(steps))]
