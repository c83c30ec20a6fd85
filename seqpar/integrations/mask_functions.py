"""Translate mask functions of transformers into lists of ranges.

A mask function of (batch, head, query, key) is composed by `and_masks` and `or_masks` from a few
functions of `transformers.masking_utils`. Evaluating the mask function for all pairs of a query and
a key would take quadratic time. This module therefore recognises the composed functions by name,
and reads the variables in their closures. All other functions are refused.

An *area* is a rectangle of queries and keys, in which the pairs with key − query between two limits
are visible. The functions below take a list of areas and return the areas that a mask function
leaves visible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getclosurevars
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    CuSeqlens,
    Ints,
    as_int,
    check_function,
    parse_cu_seqlens,
)
from seqpar.core.compiling import outside_graphs
from seqpar.core.ranges import UNLIMITED, overlapping
from seqpar.masks import Range, Ranges

__all__ = ["ranges_of"]

Closed = Mapping[str, Any]  # the variables that a function closes over
_MODULE = "transformers.masking_utils"
_SAMPLED_PAIRS = 512  # pairs for which the function is compared with the areas


@outside_graphs
def ranges_of(
    mask_function: Callable[..., Any],
    q_length: int,
    kv_length: int | None = None,
    *,
    batch: int = 0,
    cu_seqlens: CuSeqlens | None = None,
) -> Ranges:
    """Return a transformers mask function as ranges, for `seqpar.Mask.of_ranges`.

    Args:
        mask_function: as transformers composes it, with or without offsets of a cache.
        q_length: the number of queries in the row.
        kv_length: the number of keys in the row. None stands for `q_length`.
        batch: the index of the row in the batch.
        cu_seqlens: the offsets of the row's documents. None if the row is one document.

    Raises:
        ValueError: if `mask_function` contains an unknown function, if a sample of pairs shows that
            it differs from the ranges, or if it lets documents attend to each other.
    """
    check_function("mask_function", mask_function)
    rows = as_int("q_length", q_length, 0)
    keys = rows if kv_length is None else as_int("kv_length", kv_length, 0)
    whole = [Area(0, rows, 0, keys)] if rows and keys else []
    areas = _checked(mask_function, whole, as_int("batch", batch, 0))
    cu = parse_cu_seqlens(rows if cu_seqlens is None else cu_seqlens)
    if cu_seqlens is None:
        return [_as_range(area, 0, 0) for area in areas]
    return [_in_document(area, cu) for area in areas]


def ranges_within(
    mask_function: Callable[..., Any], documents: Sequence[tuple[int, int, int]]
) -> Ranges:
    """Return the visible (query, key) pairs of a transformers mask function, as ranges for
    `Mask.of_ranges`.

    Only pairs within one of the given documents are returned.

    Each document is (row, start, stop): the columns start … stop − 1 of a row of the batch. Columns
    between documents, such as padding, are left out. Errors are as in `ranges_of`.
    """
    check_function("mask_function", mask_function)
    rows: dict[int, list[int]] = {}
    for document, (row, _, _) in enumerate(documents):
        rows.setdefault(row, []).append(document)
    found = []
    for row, own in rows.items():
        within = [Area(*documents[i][1:], *documents[i][1:]) for i in own]
        within = [part for square in within for part in square.trimmed()]
        starts = [documents[i][1] for i in own]
        for area in _checked(mask_function, within, row):
            at = bisect_right(starts, area.q_start) - 1
            found.append(_as_range(area, own[at], starts[at]))
    return found


def _checked(function: Callable[..., Any], within: list[Area], batch: int) -> list[Area]:
    areas = [x for some in _shown(function, within, batch) for x in some.trimmed()]
    _compare(function, areas, within, batch)
    return areas


def _shown(function: Callable[..., Any], within: list[Area], batch: int) -> list[Area]:
    name = getattr(function, "__qualname__", type(function).__name__)
    known = _KNOWN.get(name) if getattr(function, "__module__", None) == _MODULE else None
    if known is None:
        where = f"{getattr(function, '__module__', '?')}.{name}"
        expected = f"composed of functions of {_MODULE} that show ranges"
        raise ValueError(f"mask_function must be {expected}, got {where}")
    return known(within, getclosurevars(function).nonlocals, batch)


def _banded(within: list[Area], low: int, high: int) -> list[Area]:
    bands = (x._replace(low=max(x.low, low), high=min(x.high, high)) for x in within)
    return [area for band in bands for area in band.trimmed()]


def _and(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    for function in closed["mask_functions"]:
        within = _shown(function, within, batch)
    return within


def _or(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    """Return the pairs that at least one of several mask functions leaves visible, as areas that do
    not overlap.
    """
    functions = closed["mask_functions"]
    counts = [len(_shown(function, within, batch)) for function in functions]
    found, before = list[Area](), list[Area]()
    for i in np.argsort(counts, kind="stable").tolist():
        for other in before:
            within = [rest for area in within for rest in area.without(other)]
        before = _shown(functions[i], within, batch)
        found += before
    return found


def _chunked(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    size, first = int(closed["chunk_size"]), int(closed["left_padding"][batch])
    found = []
    for area in within:
        begin, end = max(area.q_start, area.k_start), min(area.q_stop, area.k_stop)
        for chunk in range((begin - first) // size, (end - 1 - first) // size + 1):
            start = first + chunk * size
            found += area.meets(Area(start, start + size, start, start + size))
    return found


def _alike(within: list[Area], labels: Tensor, least: int | None = None) -> list[Area]:
    values = labels.detach().cpu().numpy()
    edges = np.flatnonzero(np.r_[True, values[1:] != values[:-1], True]).tolist()
    runs: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(edges):
        if least is None or values[start] >= least:
            runs.setdefault(int(values[start]), []).append((start, stop))
    return _met(within, [Area(*q, *k) for alike in runs.values() for q in alike for k in alike])


def _met(within: list[Area], others: list[Area]) -> list[Area]:
    edges = [np.array(x, np.int64).reshape(-1, 6) for x in (within, others)]
    queries = [(np.zeros(len(x), np.int64), x[:, 0], x[:, 1]) for x in edges]
    pairs = (index.tolist() for index in overlapping(*queries))
    return [found for i, j in zip(*pairs, strict=True) for found in within[i].meets(others[j])]


def _padded(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    shown = closed["padding_mask"][batch].detach().cpu().numpy().astype(bool)
    edges = np.flatnonzero(np.diff(np.r_[False, shown, False])).reshape(-1, 2).tolist()
    return _met(within, [Area(0, MAX_DOCUMENT_TOKENS, start, stop) for start, stop in edges])


def _remapped(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    """Return the areas of `within` that are visible under a mask function that reads `position_ids`
    instead of columns. An area is a rectangle of query columns and key columns.
    """
    positions = closed["position_ids"][batch].detach().cpu().numpy()
    edges = np.flatnonzero(np.r_[True, np.diff(positions) != 1, True])
    found = []
    for area in within:
        for q0, q1 in _pieces(edges, area.q_start, area.q_stop):
            for k0, k1 in _pieces(edges, area.k_start, area.k_stop):
                by = int(positions[q0]) - q0, int(positions[k0]) - k0
                part = area.meets(Area(q0, q1, k0, k1))
                found += _shown_at(by, closed["mask_function"], part, batch)
    return found


def _pieces(edges: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    inside = edges[(edges > start) & (edges < stop)].tolist()
    return pairwise([start, *inside, stop])


def _offset(within: list[Area], closed: Closed, batch: int) -> list[Area]:
    by = int(closed["q_offset"]), int(closed["kv_offset"])
    return _shown_at(by, closed["mask_function"], within, batch)


def _shown_at(by: tuple[int, int], function: Any, within: list[Area], batch: int) -> list[Area]:
    shown = _shown(function, [area.moved(*by) for area in within], batch)
    return [area.moved(-by[0], -by[1]) for area in shown]


def _compare(
    function: Callable[..., Any], areas: list[Area], within: list[Area], batch: int
) -> None:
    """Raise a ValueError if a sample of pairs shows that the visible pairs of the areas are not
    those of the mask function.
    """
    if not within:
        return
    random = np.random.default_rng(0)
    squares = np.array(within)[random.integers(0, len(within), _SAMPLED_PAIRS)]
    q, k = (random.integers(squares[:, i], squares[:, i + 1]) for i in (0, 2))
    # Half of the pairs are close to a corner of an area.
    near = random.integers(-2, 3, _SAMPLED_PAIRS // 2)
    if areas:
        corners = np.array(areas)[random.integers(0, len(areas), near.size)]
        sides = random.integers(0, 2, (2, near.size))
        q[: near.size] = corners[np.arange(near.size), sides[0]] + near
        k[: near.size] = corners[np.arange(near.size), 2 + sides[1]] + near[::-1]
        edges = np.array([square.q_start for square in within])
        squares[: near.size] = np.array(within)[np.searchsorted(edges, corners[:, 0], "right") - 1]
    q, k = (np.clip(x, squares[:, i], squares[:, i + 1] - 1) for x, i in ((q, 0), (k, 2)))
    expected = function(batch, 0, torch.from_numpy(q), torch.from_numpy(k))
    seen = np.zeros(q.size, bool)
    for q0, q1, k0, k1, low, high in areas:
        inside = (q >= q0) & (q < q1) & (k >= k0) & (k < k1)
        seen |= inside & (k - q >= low) & (k - q <= high)
    wrong = np.flatnonzero(np.broadcast_to(np.asarray(expected.cpu()), seen.shape) != seen)
    if wrong.size:
        pair = f"query {q[wrong[0]]} and key {k[wrong[0]]}"
        reason = f"at {pair} it differs from its parts in known versions of transformers"
        raise ValueError(f"mask_function must be one that is understood: {reason}")


def _in_document(area: Area, cu: Ints) -> Range:
    document = int(np.searchsorted(cu, area.q_start, side="right")) - 1
    inside = document + 1 < cu.size and area.k_start >= cu[document]
    if not inside or max(area.q_stop, area.k_stop) > cu[document + 1]:
        pair = f"queries {area.q_start} to {area.q_stop} and keys {area.k_start} to {area.k_stop}"
        raise ValueError(
            f"mask_function must not let a document attend to a different one, got {pair}"
        )
    return _as_range(area, document, int(cu[document]))


def _as_range(area: Area, document: int, first: int) -> Range:
    low, high = (None if abs(bound) > MAX_DOCUMENT_TOKENS else bound for bound in area[4:])
    q0, q1, k0, k1 = (edge - first for edge in area[:4])
    return document, q0, q1, k0, k1, low, high


_KNOWN: dict[str, Callable[[list[Area], Closed, int], list[Area]]] = {
    "and_masks.<locals>.and_mask": _and,
    "or_masks.<locals>.or_mask": _or,
    "causal_mask_function": lambda within, closed, batch: _banded(within, -UNLIMITED, 0),
    "bidirectional_mask_function": lambda within, closed, batch: within,
    "sliding_window_overlay.<locals>.inner_mask": lambda within, closed, batch: _banded(
        within, 1 - int(closed["sliding_window"]), UNLIMITED
    ),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda within, closed, batch: (
        _banded(within, -int(closed["sliding_window"]), int(closed["sliding_window"]))
    ),
    "chunked_overlay.<locals>.inner_mask": _chunked,
    "blockwise_overlay.<locals>.inner_mask": lambda within, closed, batch: _alike(
        within, closed["block_sequence_ids"][batch], 0
    ),
    "packed_sequence_mask_function.<locals>.inner_mask": lambda within, closed, batch: _alike(
        within, closed["packed_sequence_mask"][batch]
    ),
    "padding_mask_function.<locals>.inner_mask": _padded,
    "remap_positions_for_packed_sequence.<locals>.inner_mask": _remapped,
    "add_offsets_to_mask_function.<locals>.inner_mask": _offset,
}


class Area(NamedTuple):
    """An area of a mask: queries, keys, and a band of key − query, as in `Mask.of_ranges`."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int = -UNLIMITED
    high: int = UNLIMITED

    def meets(self, other: Area) -> list[Area]:
        q0, q1, k0, k1, low, high = zip(self, other, strict=True)
        return Area(max(q0), min(q1), max(k0), min(k1), max(low), min(high)).trimmed()

    def trimmed(self) -> list[Area]:
        """Return a list with this area, without queries and keys that have no visible pair. The
        list is empty if the area has no visible pair.
        """
        q0, q1, k0, k1, low, high = self
        if q0 >= q1 or k0 >= k1 or low > high:
            return []
        q0, q1 = max(q0, k0 - high), min(q1, k1 - low)
        k0, k1 = max(k0, q0 + low), min(k1, q1 + high)
        return [Area(q0, q1, k0, k1, low, high)] if q0 < q1 and k0 < k1 else []

    def without(self, other: Area) -> list[Area]:
        common = self.meets(other)
        if not common:
            return [self]
        q0, q1 = common[0].q_start, common[0].q_stop
        k0, k1 = max(self.k_start, other.k_start), min(self.k_stop, other.k_stop)
        rest = [
            self._replace(q_stop=q0),
            self._replace(q_start=q1),
            self._replace(q_start=q0, q_stop=q1, k_stop=k0),
            self._replace(q_start=q0, q_stop=q1, k_start=k1),
            Area(q0, q1, k0, k1, self.low, min(self.high, other.low - 1)),
            Area(q0, q1, k0, k1, max(self.low, other.high + 1), self.high),
        ]
        return [area for some in rest for area in some.trimmed()]

    def moved(self, queries: int, keys: int) -> Area:
        q0, q1, k0, k1, low, high = self
        by = keys - queries
        return Area(q0 + queries, q1 + queries, k0 + keys, k1 + keys, low + by, high + by)
