"""Assign the documents of an epoch to steps, independently of the number of ranks."""

from __future__ import annotations

import heapq

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import mix


def in_order(lengths: Ints, most: int) -> list[Ints]:
    """Divide documents, in their order, between the fewest parts of at most `most` tokens.

    Return the indices of each part. A longer document is a separate part.
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

    Each step takes the next documents while they have at most `tokens` tokens. With `deferral`, the
    documents of each window of `deferral` + 1 steps are then spread evenly over these steps, so a
    document moves back by at most `deferral` steps. The order is a sort by hashes, so it is the
    same with every version of numpy.
    """
    of_epoch = int(mix(np.array([epoch]), seed)[0])
    order = np.argsort(mix(np.arange(lengths.size), of_epoch), kind="stable")
    steps = [order[part] for part in in_order(lengths[order], tokens)]
    if not deferral:
        return steps
    windows = (steps[i : i + deferral + 1] for i in range(0, len(steps), deferral + 1))
    return [step for window in windows for step in _dealt(lengths, window, tokens)]


def _dealt(lengths: Ints, steps: list[Ints], tokens: int) -> list[Ints]:
    """Deal the steps' documents again, longest first, each to the step with least work.

    Work is the share of the tokens plus that of the squared lengths. If a document finds no room,
    the steps stay as they are.
    """
    documents = np.concatenate(steps)
    documents = documents[np.argsort(-lengths[documents], kind="stable")]
    size = lengths[documents].astype(np.float64)
    work = size / size.sum() + np.square(size) / np.square(size).sum()
    dealt: list[list[int]] = [[] for _ in steps]
    held, least = [0] * len(steps), [(0.0, number) for number in range(len(steps))]
    for document, length, weight in zip(
        documents.tolist(), lengths[documents].tolist(), work.tolist(), strict=True
    ):
        full = []
        while least and held[least[0][1]] + length > tokens:
            full.append(heapq.heappop(least))
        if not least:
            return steps
        done, number = heapq.heappop(least)
        dealt[number].append(document)
        held[number] += length
        for entry in [(done + weight, number), *full]:
            heapq.heappush(least, entry)
    return [np.array(step, np.int64) for step in dealt]
