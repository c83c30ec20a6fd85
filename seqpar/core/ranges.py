"""Arithmetic on arrays of integers and ranges, without loops."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints

T = TypeVar("T", bound=np.generic)
POSITION_BITS = 32  # bits of a position in a sort key; documents and lengths stay below 2**31
UNLIMITED = 2**40  # a bound of a band that no position reaches


def ranges(starts: Ints, stops: Ints) -> Ints:
    """Return the integers start … stop − 1 of every range, concatenated."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if ends.size else 0)


def take_ranges(x: NDArray[T], chosen: Ints) -> NDArray[T]:
    """Return the entries of `x` whose indices lie in the ranges `chosen` (m, 2). If there is one
    range, the result is a view of `x`.
    """
    return x[slice(*chosen[0])] if len(chosen) == 1 else x[ranges(*chosen.T)]


def as_ranges(numbers: Ints) -> Ints:
    """Return the shortest list of ranges (m, 2) that contains the integers `numbers` in this
    order.
    """
    edges = np.flatnonzero(np.r_[True, np.diff(numbers) != 1, True])[: numbers.size + 1]
    return np.stack([numbers[edges[:-1]], numbers[edges[1:] - 1] + 1], 1)


def count_up(counts: Ints) -> Ints:
    """Return the integers 0 … count − 1 for each count, concatenated."""
    return ranges(np.zeros_like(counts), counts)


def enumerated(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the integers first … last of every pair, concatenated, and the index of the pair for
    each integer.
    """
    counts = last - first + 1
    index = np.repeat(np.arange(counts.size), counts)
    return index, first[index] + count_up(counts)


def sort_keys(documents: Ints, positions: Ints) -> Ints:
    """Return integers whose order is that of documents, then of positions: document << 32 |
    position.
    """
    return documents << POSITION_BITS | positions


def union(starts: Ints, stops: Ints) -> Ints:
    """Return the union of ranges that are sorted by start, as ranges (m, 2) with gaps between
    them.
    """
    reached = np.maximum.accumulate(stops)
    first, last = np.ones((2, starts.size), dtype=bool)  # faster than np.r_
    last[:-1] = first[1:] = starts[1:] > reached[:-1]
    return np.stack([starts[first], reached[last]], 1)


def rows_before(chosen: Ints, rows: Ints) -> Ints:
    """Return how many integers of the ranges `chosen` (m, 2) are below each of `rows`. The ranges
    are ascending and disjoint.
    """
    starts, stops = chosen.T
    before, ends = np.zeros((2, starts.size + 1), dtype=np.int64)  # faster than np.r_
    before[1:], ends[1:] = np.cumsum(stops - starts), stops
    last = np.searchsorted(starts, rows, side="right")  # ranges that start at or below
    return before[last] - np.maximum(ends[last] - rows, 0)


def overlapping(one: tuple[Ints, Ints, Ints], other: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the indices of all pairs of overlapping ranges, where one range of a pair is in the
    list `one` and the second range is in the list `other`.

    A list consists of the documents, starts and stops of ranges, (n,) each. Only ranges of the same
    document overlap. The time of the search is proportional to n log n plus the number of pairs.
    """
    # Of two overlapping ranges, one starts within the other. If both start at the same position,
    # the second counts as starting within the first.
    of_one, in_one = _starting_in(one, other, after=0)
    of_other, in_other = _starting_in(other, one, after=1)
    return np.concatenate([of_one, in_other]), np.concatenate([in_one, of_other])


def _starting_in(
    one: tuple[Ints, Ints, Ints], other: tuple[Ints, Ints, Ints], after: int
) -> tuple[Ints, Ints]:
    """Return the indices of all pairs of a range in `one` and a range in `other` that starts within
    the first range, and at least `after` behind its start.
    """
    (documents, starts, stops), begins = one, sort_keys(*other[:2])
    order = np.argsort(begins, kind="stable")
    order = order[other[2][order] > other[1][order]]
    begins = begins[order]
    first = np.searchsorted(begins, sort_keys(documents, starts) + after)
    counts = np.maximum(np.searchsorted(begins, sort_keys(documents, stops)) - first, 0)
    index = np.repeat(np.arange(counts.size), counts)
    return index, order[first[index] + count_up(counts)]


def mix(numbers: Ints, seed: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each integer (SplitMix64). The sum of hashes modulo 2**64
    distinguishes sets of integers.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    z = numbers.astype(np.uint64) + np.array([seed + 1], np.uint64) * gamma
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return z ^ z >> np.uint64(31)


def split_at(edges: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Split ascending ranges into parts at ascending edges, the first of which is 0.

    Returns three arrays with one entry per part: the index of the last edge at or before the part,
    and the part's start and stop, counted from this edge. Empty ranges have no parts.
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
