"""`MaskRanges`: a mask that is a list of rectangles, each with a band (`Mask.of_ranges`).

Torch operators receive the list as a tensor, in the same way as a layout (`handle.py`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    MAX_LISTED,
    Ints,
    RowIndex,
    as_int_array,
    shown,
)
from seqpar.core.ranges import UNLIMITED, sort_keys
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.handle import as_tensor, content_of, key_of, with_digest, words_of
from seqpar.layout.masks.slices_of_band import cut_at_gaps, trim

_NAMES = "document", "q_start", "q_stop", "k_start", "k_stop", "low", "high"
Range = Sequence[int | None]  # (document, q_start, q_stop, k_start, k_stop, low, high)
RangeList = Sequence[Range] | NDArray[np.generic] | Tensor


class Ranges(NamedTuple):
    """The ranges of a mask, as arrays (n,). A bound without a limit is ±`UNLIMITED`."""

    documents: Ints
    q_starts: Ints
    q_stops: Ints
    k_starts: Ints
    k_stops: Ints
    lows: Ints
    highs: Ints

    def take(self, chosen: RowIndex) -> Ranges:
        return Ranges(*(column[chosen] for column in self))

    def trimmed(self) -> tuple[Ranges, Ints]:
        """Shrink each range to the rows that have pairs.

        Ranges without pairs are left out. A bound that excludes no pair becomes unlimited. Returns
        the remaining ranges, and the index of each remaining range in `self`.
        """
        index, (q_starts, q_stops, k_starts, k_stops) = trim(*self[1:])
        lows, highs = self.lows[index], self.highs[index]
        lows = np.where(lows > k_starts - q_stops + 1, lows, -UNLIMITED)
        highs = np.where(highs < k_stops - 1 - q_starts, highs, UNLIMITED)
        edges = q_starts, q_stops, k_starts, k_stops
        return Ranges(self.documents[index], *edges, lows, highs), index

    def of_queries(self, q: Holding) -> tuple[tuple[Ints, Ints], Ranges]:
        """Cut the query rows of a rank that lie in each range of the mask into clusters.

        A *cluster* is a set of query rows that attend to one range of keys without gaps
        (`slices_of_band.py`). Returns the first row of each cluster, the row after the last row of
        each cluster, and the range of the mask to which each cluster belongs.
        """
        begins, ends = (sort_keys(self.documents, edges) for edges in self[1:3])
        own = self.take(np.flatnonzero(q.holds_some(begins, ends)))
        starts, stops = (q.rows_before(own.documents, edges) for edges in own[1:3])
        index, starts, stops = cut_at_gaps(q, starts, stops, own.highs - own.lows)
        return (starts, stops), own.take(index)

    def written(self, i: int) -> str:
        row = [int(column[i]) for column in self]
        bounds = [None if abs(bound) >= UNLIMITED else bound for bound in row[5:]]
        return str((*row[:5], *bounds))


class MaskRanges:
    """The ranges of a mask that a user has given as a list of ranges.

    The ranges do not overlap. They are sorted by document, queries, keys and allowed distances.
    `handle` is a 1-D int64 tensor on the CPU, which contains a digest of the ranges (`key`) and the
    ranges.
    """

    def __init__(self, columns: Ranges) -> None:
        words = with_digest(np.concatenate([[columns.documents.size], *columns]))
        self.columns, self.key, self.handle = columns, key_of(words), as_tensor(words)
        _by_key.setdefault(self.key, self)

    @classmethod
    def of(cls, ranges: RangeList) -> MaskRanges:
        given = _parsed(ranges)
        columns, index = given.trimmed()
        order = np.lexsort(columns[::-1])
        columns, index = columns.take(order), index[order]
        if found := find_overlap(columns):
            both, query, key = found
            pair = " and ".join(
                f"ranges[{i}], {given.written(i)}," for i in sorted(index[both].tolist())
            )
            where = f"query {query} and key {key} of document {columns.documents[both[0]]}"
            raise ValueError(f"ranges must be disjoint, but {pair} both have {where}")
        return cls(columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskRanges) and self.key == other.key

    def __hash__(self) -> int:
        return int.from_bytes(self.key[:7])

    def __len__(self) -> int:
        return self.columns.documents.size

    def __repr__(self) -> str:
        return f"<{len(self)} ranges, {self.key.hex()[:16]}>"

    def __reduce__(self) -> tuple[object, ...]:
        return MaskRanges, (self.columns,)

    @cached_property
    def _ends(self) -> tuple[int, Ints, Ints]:
        """The smallest number of documents that a layout of this mask must have, and the smallest
        number of queries and of keys in each of these documents.
        """
        documents = int(self.columns.documents.max(initial=-1)) + 1
        queries, keys = np.zeros(documents, np.int64), np.zeros(documents, np.int64)
        np.maximum.at(queries, self.columns.documents, self.columns.q_stops)
        np.maximum.at(keys, self.columns.documents, self.columns.k_stops)
        return documents, queries, keys

    def check_fits(self, queries: Geometry, keys: Geometry) -> None:
        documents, *ends = self._ends
        if documents > queries.lengths.size:
            found = f"a range of document {documents - 1} of {queries.lengths.size}"
            raise ValueError(f"mask must have ranges of the layout's documents only, got {found}")
        for name, end, geometry in zip(("queries", "keys"), ends, (queries, keys), strict=True):
            lengths = geometry.lengths[:documents]
            if (end > lengths).any():
                i = int(np.argmax(end > lengths))
                found = f"{name} up to {end[i]} of document {i}, which has {lengths[i]}"
                raise ValueError(f"mask must have ranges within the documents, got {found}")


def described(handle: Tensor, canonical: bool) -> object:
    """Return a value by which ranks compare their masks. With `canonical`, the value is a text for
    errors.
    """
    digest = key_of_handle(handle).hex()[:16]
    if not canonical:
        return digest
    ranges = from_handle(handle)
    words = {"ranges": f"{len(ranges)} range{'s' * (len(ranges) != 1)}"}
    for i in range(min(len(ranges), MAX_LISTED)):
        words[f"range {i}"] = f"the range {ranges.columns.written(i)}"
    return words | {"digest": f"ranges with the digest {digest}"}


def from_handle(handle: Tensor) -> MaskRanges:
    """Return the ranges of a handle, or of a copy of a handle. Raise a ValueError if the content of
    the handle was changed.
    """
    words = words_of(handle)
    found = _by_key.get(key_of(words))
    if found is None:
        error = "mask: code has changed the tensor that describes the mask"
        content = content_of(words, error)
        found = MaskRanges(Ranges(*content[1:].reshape(7, -1).copy()))
    return found


def key_of_handle(handle: Tensor) -> bytes:
    return key_of(words_of(handle))


_by_key: weakref.WeakValueDictionary[bytes, MaskRanges] = weakref.WeakValueDictionary()


def _parsed(ranges: RangeList) -> Ranges:
    found = Ranges(*_columns(ranges))

    def refuse(wrong: NDArray[np.bool_], wanted: str) -> None:
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(f"ranges[{i}] must have {wanted}, got {found.written(i)}")

    most = MAX_DOCUMENT_TOKENS
    for name, column in zip(_NAMES[:5], found, strict=False):
        refuse((column < 0) | (column > most), f"{name} from 0 to {most}")
    for first, second in ((1, 2), (3, 4), (5, 6)):
        refuse(found[first] > found[second], f"{_NAMES[first]} <= {_NAMES[second]}")
    lows, highs = (np.clip(bounds, -UNLIMITED, UNLIMITED) for bounds in (found.lows, found.highs))
    return found._replace(lows=lows, highs=highs)


def _columns(ranges: RangeList) -> list[Ints]:
    expected = f"ranges must be ({', '.join(_NAMES)}) each"
    columns: list[Any]
    if isinstance(ranges, np.ndarray | Tensor):
        if ranges.ndim != 2 or ranges.shape[1] != len(_NAMES):
            raise ValueError(f"{expected}, got {tuple(ranges.shape)} of {ranges.dtype}")
        columns = list(ranges.T)
    else:
        try:
            rows = [tuple(row) for row in ranges]
        except TypeError:
            raise ValueError(f"{expected}, got {shown(ranges)}") from None
        for i, row in enumerate(rows):
            if len(row) != len(_NAMES):
                raise ValueError(f"{expected}, got {shown(row)} at index {i}")
        columns = list(zip(*rows, strict=True)) or [()] * len(_NAMES)
        for column, unlimited in ((5, -UNLIMITED), (6, UNLIMITED)):
            columns[column] = [unlimited if bound is None else bound for bound in columns[column]]
    named = zip(_NAMES, columns, strict=True)
    return [as_int_array(f"ranges: {name}", column) for name, column in named]


def find_overlap(ranges: Ranges) -> tuple[Ints, int, int] | None:
    """Return two overlapping ranges and a pair that is in both, or None if no ranges overlap.

    The result has the indices of the two ranges, (2,), and the positions of the query and the key
    of the pair. The ranges must be sorted by document, and within a document by `q_starts`.
    """
    pairs = _neighbours(ranges)
    one, other = (ranges.take(column) for column in pairs)
    q_first = np.maximum(one.q_starts, other.q_starts)
    q_last = np.minimum(one.q_stops, other.q_stops) - 1
    k_first = np.maximum(one.k_starts, other.k_starts)
    k_last = np.minimum(one.k_stops, other.k_stops) - 1
    low = np.maximum.reduce([one.lows, other.lows, k_first - q_last])
    high = np.minimum.reduce([one.highs, other.highs, k_last - q_first])
    shared = np.flatnonzero((q_first <= q_last) & (k_first <= k_last) & (low <= high))
    if not shared.size:
        return None
    i = int(shared[0])
    query = int(max(q_first[i], k_first[i] - low[i]))
    return pairs[:, i], query, query + int(low[i])


def _neighbours(ranges: Ranges) -> Ints:
    """Return pairs of ranges that have neighbouring intervals of keys at some query, (2, n).

    If two ranges overlap, the pairs up to the first overlap are returned. They contain two ranges
    that overlap.
    """
    # The search goes through the queries in order. At each query, a range has an interval of keys.
    # From one query to the next, an edge of an interval moves by one key or not at all, so
    # intervals keep their order as long as they do not overlap. The first two intervals that
    # overlap were therefore neighbours before, as in the sweep of Shamos and Hoey ("Geometric
    # intersection problems", 1976).
    begins, ends = (sort_keys(ranges.documents, edges) for edges in ranges[1:3])
    shares = begins[1:] < np.maximum.accumulate(ends)[:-1]
    index = np.flatnonzero(np.r_[False, shares] | np.r_[shares, False])
    begins, ends, ranges = begins[index], ends[index], ranges.take(index)
    count, pairs = index.size, list[tuple[int, int]]()
    # If several ranges end at the same query, the last one in the list is removed first, because
    # removing the end of a list is fast.
    ties = np.r_[np.arange(count), -np.arange(count)]
    order = np.lexsort((ties, np.repeat([1, 0], count), np.r_[begins, ends])).tolist()
    firsts, offsets = ranges.k_starts.tolist(), ranges.lows.tolist()
    # The queries at which ranges begin and end.
    at_query = np.r_[ranges.q_starts, ranges.q_stops - 1].tolist()
    present: list[int] = []  # the ranges at the current query, ordered by their first key
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
            break  # the order has changed, because two neighbours overlap
        del present[at]
        if 0 < at < len(present):
            pairs.append((present[at - 1], present[at]))
    return index[np.array(pairs, dtype=np.int64).reshape(-1, 2)].T
