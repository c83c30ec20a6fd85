"""Assign the documents of an epoch to steps, independently of the number of ranks."""

from __future__ import annotations

import numpy as np

from seqpar.balance.planning.divide import to_lightest
from seqpar.core.arguments import Ints
from seqpar.core.ranges import mix


def in_order(lengths: Ints, most: int) -> list[Ints]:
    """Divide documents, in order, into few parts of up to `most` tokens; longer ones are alone."""
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
    documents of `deferral` + 1 steps are then spread evenly over these. The order is a sort by
    hashes, the same with every version of numpy.
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
    found = to_lightest(lengths[documents], work, len(steps), tokens)
    if found is None:
        return steps
    return [documents[found == number] for number in range(len(steps))]
