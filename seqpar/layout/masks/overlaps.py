"""Find two ranges of a mask that share a (query, key) pair, by a sweep over the queries.

At each query a range has an interval of keys. As long as ranges are disjoint, these intervals stay
in the same order: from one query to the next an edge of an interval moves by one key or not at all.
As in the sweep of Shamos and Hoey ("Geometric intersection problems", 1976), the first two
intervals that overlap were therefore neighbours in that order before. The sweep takes time n log n.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import sort_keys


class Overlap(NamedTuple):
    """Two ranges, and a pair that both contain."""

    one: int
    other: int
    query: int
    key: int


def find_overlap(
    documents: Ints,
    q_starts: Ints,
    q_stops: Ints,
    k_starts: Ints,
    k_stops: Ints,
    lows: Ints,
    highs: Ints,
) -> Overlap | None:
    """Return two overlapping ranges, or None. Ranges are in order of documents and `q_starts`."""
    begins, ends = sort_keys(documents, q_starts), sort_keys(documents, q_stops)
    some = _beside_others(begins, ends)
    one, other = _neighbours(
        some, begins[some], ends[some], q_starts[some], k_starts[some], lows[some]
    )
    q_first = np.maximum(q_starts[one], q_starts[other])
    q_last = np.minimum(q_stops[one], q_stops[other]) - 1
    k_first = np.maximum(k_starts[one], k_starts[other])
    k_last = np.minimum(k_stops[one], k_stops[other]) - 1
    low = np.maximum.reduce([lows[one], lows[other], k_first - q_last])
    high = np.minimum.reduce([highs[one], highs[other], k_last - q_first])
    shared = np.flatnonzero((q_first <= q_last) & (k_first <= k_last) & (low <= high))
    if not shared.size:
        return None
    i = int(shared[0])
    query = int(max(q_first[i], k_first[i] - low[i]))
    return Overlap(int(one[i]), int(other[i]), query, query + int(low[i]))


def _beside_others(begins: Ints, ends: Ints) -> Ints:
    reached = np.maximum.accumulate(ends)
    shares = begins[1:] < reached[:-1]
    return np.flatnonzero(np.r_[False, shares] | np.r_[shares, False])


def _neighbours(
    index: Ints, begins: Ints, ends: Ints, q_starts: Ints, k_starts: Ints, lows: Ints
) -> tuple[Ints, Ints]:
    """Return all pairs of ranges that are ever neighbours, at least up to the first overlap."""
    count, pairs = index.size, list[tuple[int, int]]()
    last_queries = ends - begins + q_starts - 1
    # Ranges that end at the same query are removed last first, which is cheap in a list.
    ties = np.r_[np.arange(count), -np.arange(count)]
    order = np.lexsort((ties, np.repeat([1, 0], count), np.r_[begins, ends])).tolist()
    firsts, offsets = k_starts.tolist(), lows.tolist()
    at_query = q_starts.tolist() + last_queries.tolist()  # where each range begins, and ends
    present: list[int] = []  # sorted by each range's first key at the query
    for event in order:
        query, i = at_query[event], event % count

        def first_key(j: int, query: int = query) -> int:
            first, moving = firsts[j], query + offsets[j]
            return first if first > moving else moving

        at = bisect_left(present, first_key(i), key=first_key)
        if event < count:
            pairs += [(i, j) for j in present[max(at - 1, 0) : at + 1]]
            present.insert(at, i)
            continue
        if present[at : at + 1] != [i]:
            break  # the order has changed, so two neighbours overlap
        del present[at]
        if 0 < at < len(present):
            pairs.append((present[at - 1], present[at]))
    table = index[np.array(pairs, dtype=np.int64).reshape(-1, 2)]
    return table[:, 0], table[:, 1]
