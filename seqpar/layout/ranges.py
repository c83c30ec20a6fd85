"""Arithmetic on many integers and ranges at once, without a loop over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqpar.arguments import Ints

POSITION_BITS = 32  # of a sort key: documents and their lengths stay below 2**31


def ranges(starts: Ints, stops: Ints) -> Ints:
    """Return the integers of every [start, stop), one range after another."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if ends.size else 0)


def count_up(counts: Ints) -> Ints:
    """Return 0 … count − 1 for each count, one after another."""
    return ranges(np.zeros_like(counts), counts)


def sort_keys(documents: Ints, positions: Ints) -> Ints:
    """Return integers that sort by document, then position: document << 32 | position."""
    return documents << POSITION_BITS | positions


def join_touching(starts: Ints, stops: Ints) -> Ints:
    """Return ascending ranges as (m, 2), those that touch joined into one."""
    apart = starts[1:] != stops[:-1]
    first, last = np.r_[True, apart][: starts.size], np.r_[apart, True][: starts.size]
    return np.stack([starts[first], stops[last]], 1)


def mix(numbers: Ints, seed: int) -> NDArray[np.uint64]:
    """Return 64-bit hashes of integers (SplitMix64), other ones for each seed.

    Sums of them, modulo 2**64, tell sets of integers apart.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    z = numbers.astype(np.uint64) + np.array([seed + 1], np.uint64) * gamma
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return z ^ z >> np.uint64(31)


def split_at(edges: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Split ascending ranges at ascending edges, the first of which is 0.

    Return for each part, as arrays, between which edges it lies, and where it starts and stops
    behind the first of these. Empty ranges have no parts.
    """
    starts, stops = starts[stops > starts], stops[stops > starts]
    if not starts.size:
        return starts, starts, starts
    inside = edges[
        np.searchsorted(starts, edges, side="right") > np.searchsorted(stops, edges, side="right")
    ]
    begins = np.unique(np.r_[starts, inside])
    between = np.searchsorted(edges, begins, side="right") - 1
    ends = np.minimum(stops[np.searchsorted(starts, begins, side="right") - 1], edges[between + 1])
    return between, begins - edges[between], ends - edges[between]
