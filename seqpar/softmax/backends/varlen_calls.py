"""Cut slices into calls of a varlen kernel, such as FlashAttention's.

A varlen kernel computes many *segments* in one call. A segment is a run of query rows with a run of
key rows, and all segments of a call share one window (left, right): with both ends aligned, query
row i of n attends to the key rows i + m − n − left … i + m − n + right of m; −1 is unlimited. So
(−1, −1) is a full rectangle and (−1, 0) a causal one. Rows ascend in position on both sides.
Therefore a rank's own keys under a causal mask are causal on any layout, and on a zigzag layout
each other hop is one full rectangle per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import on_device
from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.wire.row_messages import Rows

Window = tuple[int, int]
# A slice is cut into runs of rows with the same keys if runs have on average at least this many
# rows.
_MIN_RUN_ROWS = 256
# The lengths of a dense call's segments are multiples of it. Lengths that differ from step to step
# seldom are.
_DENSE_ROWS = 128


class Segment(NamedTuple):
    """Query rows and key rows that one segment of a call computes."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    # left, right: the window that the segment needs, or −1 for a side that masks no key
    left: int
    right: int

    def fits(self, window: Window) -> bool:
        """Return whether the segment has the same pairs under this window."""
        rows, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        masks_nothing = keys - 1, rows - 1  # windows from these on
        return all(
            given == own or (own == -1 and given >= least)
            for own, given, least in zip(self[4:], window, masks_nothing, strict=True)
        )


class SegmentTables(NamedTuple):
    """The segments of a call on a device, for kernels."""

    # cu_q, cu_k: int32 (n + 1,), where each of n segments begins among the call's rows
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int  # the rows of the longest segment
    longest_k: int  # at least the keys of the longest segment
    window: Window  # the window of all segments


class VarlenCall:
    """One call of a varlen kernel.

    No two segments share a query row or a key row.

    Attributes:
        queries, keys: the rows of all segments, in their order.
        query_key: equal for calls with the same query rows.
        is_dense: whether all segments have the same rows and keys, multiples of 128, and are full,
            or causal with equal numbers of keys and rows.
    """

    def __init__(self, segments: Sequence[Segment], window: Window) -> None:
        table = np.array([x[:4] for x in segments], dtype=np.int64)
        queries, keys = (_joined(table[:, i : i + 2]) for i in (0, 2))
        self.queries, self.keys, self.query_key = Rows(queries), Rows(keys), queries.tobytes()
        self._lengths = rows, keys = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
        self._window = window
        shapes = {*zip(rows.tolist(), keys.tolist(), strict=True)}
        self.is_dense = len(shapes) == 1 and _is_dense(*shapes.pop(), window)
        self._tables = Memo()

    def tables(self, batch: int, device: torch.device) -> SegmentTables:
        """Return the segments of all batch entries, whose rows follow each other."""

        def build() -> SegmentTables:
            edges = (np.r_[0, np.tile(x, batch).cumsum()].astype(np.int32) for x in self._lengths)
            cu_q, cu_k = map(torch.from_numpy, edges)
            longest_q, longest_k = (int(x.max()) for x in self._lengths)
            # If only the left side is limited, FlashAttention-2 uses longest_k as the right side.
            # It takes right sides of at least longest_k as unlimited.
            longest_k = max(longest_q, longest_k)
            return SegmentTables(cu_q, cu_k, longest_q, longest_k, self._window)

        on_host = self._tables(batch, build)
        cu_q, cu_k = (on_device(x, device) for x in on_host[:2])
        return on_host._replace(cu_q=cu_q, cu_k=cu_k)

    def request_tables(self, batch: int, device: torch.device) -> None:
        self.tables(batch, device)
        self.queries.local(device)
        self.keys.local(device)


class VarlenWork(NamedTuple):
    """The calls of a varlen kernel, and the slices that it cannot compute."""

    calls: list[VarlenCall]
    remaining: Slices | None


def varlen_work(slices: Slices) -> VarlenWork:
    """Return the calls that compute the slices, built once per slices."""
    return slices.derived("varlen work", lambda: _build(slices))


def _build(slices: Slices) -> VarlenWork:
    segments, remaining = list[Segment](), list[int]()
    for i in range(len(slices)):
        first = int(slices.q_rows[i, 0]), int(slices.k_rows[i, 0])
        parts = _segments(*first, *slices.key_intervals(i))
        if parts is None:
            remaining.append(i)
        else:
            segments += parts
    calls = []
    for window, members in _by_window(_join_keys(segments)).items():
        calls += [VarlenCall(layer, window) for layer in _layers(members)]
    if not remaining:
        return VarlenWork(calls, None)
    tables = {name: getattr(slices, name)[remaining] for name in ("q_rows", "k_rows", "bands")}
    return VarlenWork(calls, replace(slices, **tables, derived=Memo()))


def _segments(q_start: int, k_start: int, start: Ints, stop: Ints) -> list[Segment] | None:
    """Return segments of query rows that attend to the key rows k_start + start … stop − 1 each.

    Return None if the slice has no such segments.
    """
    seeing = np.flatnonzero(stop > start)
    if not seeing.size:
        return []
    kept = slice(int(seeing[0]), int(seeing[-1]) + 1)
    q_start, q_stop = q_start + kept.start, q_start + kept.stop
    first = int(start[kept.start])
    k_start, start, stop = k_start + first, start[kept] - first, stop[kept] - first
    rows, keys, row = stop.size, int(stop[-1]), np.arange(stop.size)
    low, high = int(start[-1]) - rows + 1, int(stop[0])
    left = keys - rows - low if start[-1] else -1
    right = high - 1 - keys + rows if high < keys else -1
    is_band = (left < 0 or (start == np.maximum(row + low, 0)).all()) and (
        high == keys or (stop == np.minimum(row + high, keys)).all()
    )
    if not is_band:
        return _runs(q_start, k_start, start, stop)
    if left < 0 < right:  # causal rows, then rows that attend to all keys
        cut = keys - high + 1
        causal = Segment(q_start, q_start + cut, k_start, k_start + keys, -1, 0)
        return [causal, Segment(q_start + cut, q_stop, k_start, k_start + keys, -1, -1)]
    return [Segment(q_start, q_stop, k_start, k_start + keys, left, right)]


def _runs(q_start: int, k_start: int, start: Ints, stop: Ints) -> list[Segment] | None:
    """Return a full segment per run of rows with the same keys, if the runs are long."""
    edges = np.flatnonzero((np.diff(start) != 0) | (np.diff(stop) != 0)) + 1
    if stop.size < (edges.size + 1) * _MIN_RUN_ROWS:
        return None
    first, after = np.r_[0, edges], np.r_[edges, stop.size]
    runs = zip(
        first.tolist(), after.tolist(), start[first].tolist(), stop[first].tolist(), strict=True
    )
    return [
        Segment(q_start + a, q_start + b, k_start + c, k_start + d, -1, -1)
        for a, b, c, d in runs
        if d > c
    ]


def _join_keys(segments: list[Segment]) -> list[Segment]:
    """Join full segments of the same query rows over adjacent keys."""
    result = [x for x in segments if (x.left, x.right) != (-1, -1)]
    for x in sorted(x for x in segments if (x.left, x.right) == (-1, -1)):
        last = result[-1] if result else None
        if last and x[:2] == last[:2] and x.k_start == last.k_stop and last[4:] == (-1, -1):
            result[-1] = last._replace(k_stop=x.k_stop)
        else:
            result.append(x)
    return result


def _by_window(segments: list[Segment]) -> dict[Window, list[Segment]]:
    """Group segments by window; one that fits several windows joins the first of them."""
    groups: dict[Window, list[Segment]] = {}
    for x in sorted(segments, key=lambda x: (x.left < 0) + (x.right < 0)):
        window = next(filter(x.fits, groups), (x.left, x.right))
        groups.setdefault(window, []).append(x)
    return groups


def _layers(segments: list[Segment]) -> list[list[Segment]]:
    """Split segments into lists in which no two share a row, each in order of its rows."""
    layers: list[list[Segment]] = []
    for x in sorted(segments, key=lambda x: (x.k_start, x.q_start)):
        for layer in layers:
            if layer[-1].q_stop <= x.q_start and layer[-1].k_stop <= x.k_start:
                layer.append(x)
                break
        else:
            layers.append([x])
    return layers


def _is_dense(rows: int, keys: int, window: Window) -> bool:
    is_full_or_square = window == (-1, -1) or (window == (-1, 0) and rows == keys)
    return is_full_or_square and not (rows % _DENSE_ROWS or keys % _DENSE_ROWS)


def _joined(ranges: Ints) -> Ints:
    begins = np.r_[True, ranges[1:, 0] != ranges[:-1, 1]]
    ends = np.r_[begins[1:], True]
    return np.stack([ranges[begins, 0], ranges[ends, 1]], 1)
