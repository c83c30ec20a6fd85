"""Mask and Slices: who may see whom, and what it costs.

A mask is causal, windowed, full or with a prefix, always within a document. For a rank that owns queries and a rank that
owns keys it compiles to *slices*: (q rows, k rows, band lo ≤ k_pos − q_pos ≤ hi). Slices never overlap, so no pair of
tokens counts twice. Since positions ascend within a run, the keys that a query sees are one interval of rows, found by
bisection; tables are therefore linear in (document, peer) pairs, however finely a layout cuts its documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.geometry import Geometry, Holding, Ints, as_int, ranges

UNLIMITED = 2**40  # a band bound that no position reaches
Rows32 = NDArray[np.int32]


@dataclass(frozen=True)
class Mask:
    """Within a document a query at position i sees the keys at i − left … i + right, and the first `prefix` ones.

    `left` and `right` may be `UNLIMITED`; `prefix` holds a number of keys for each document, or is None. Where a document
    has other keys than queries (`kv_layout`), their ends are aligned: query i stands at position i + L_kv − L_q.
    """

    left: int
    right: int
    prefix: tuple[int, ...] | None = None

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int, int], prefix_lens: Ints | None, keys: Geometry) -> Mask:
        """The mask that these arguments of an attention call describe; a ValueError names the one that is wrong."""
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, got {causal!r}")
        if len(window_size) != 2:
            raise ValueError(f"window_size must be (left, right), got {window_size!r}")
        left, right = (as_int("window_size: a bound (-1 is unlimited)", bound, -1) for bound in window_size)
        left, right = (UNLIMITED if bound == -1 else bound for bound in (left, right))
        if causal:
            right = 0
        if prefix_lens is None:
            return cls(left, right)
        if prefix_lens.shape != keys.lengths.shape:
            raise ValueError(f"prefix_lens must have one entry a document, {keys.lengths.size}, got {prefix_lens.size}")
        wrong = (prefix_lens < 0) | (prefix_lens > keys.lengths)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(f"prefix_lens[{i}] must lie in 0 to {keys.lengths[i]} (the document), got {prefix_lens[i]}")
        return cls(left, right, tuple(prefix_lens.tolist()))


@dataclass(eq=False)
class Slices:
    """The slices of one rank's query rows over a block of key rows, as arrays with an entry a slice.

    `q_rows` and `k_rows` are (n, 2) row ranges, the latter into the block; `bands` is (n, 2), lo and hi; `q_positions`
    (T_q,) and `k_positions` (T_k,) give each row its position. One side travels, keys or queries: `sent_rows` are the (m, 2)
    ranges of its owner's local rows that, one after another, make up its rows here: just those that see or are seen, or all
    where nothing travels because both sides are on one rank.
    """

    q_rows: Ints
    k_rows: Ints
    bands: Ints
    q_positions: Rows32
    k_positions: Rows32
    sent_rows: Ints
    lowered: dict[Any, Any] = field(default_factory=dict, repr=False)  # what a backend makes of the slices, kept with them

    def __len__(self) -> int:
        return len(self.q_rows)

    @property
    def keys(self) -> int:
        """How many key rows the block has."""
        return self.k_positions.size

    @property
    def queries(self) -> int:
        """How many query rows there are."""
        return self.q_positions.size

    def visible(self, i: int) -> tuple[Ints, Ints]:
        """For each query row of slice i the interval [start, stop) of the slice's key rows that it sees."""
        q_positions = self.q_positions[slice(*self.q_rows[i])].astype(np.int64)
        k_positions = self.k_positions[slice(*self.k_rows[i])]
        low, high = self.bands[i]
        start = np.searchsorted(k_positions, q_positions + low, side="left")
        return start, np.searchsorted(k_positions, q_positions + high, side="right")

    def seen(self, rows: slice, keys: slice, band: Sequence[int]) -> Tensor:
        """(n, m) bool: which of these key rows each of these query rows sees under a slice's band."""
        q_positions, k_positions = torch.from_numpy(self.q_positions[rows]), torch.from_numpy(self.k_positions[keys])
        distance = k_positions.long() - q_positions[:, None]
        return (distance >= band[0]) & (distance <= band[1])

    @cached_property
    def area(self) -> int:
        """The number of (query, key) pairs that see each other."""
        return sum(int((stop - start).sum()) for start, stop in map(self.visible, range(len(self))))

    @classmethod
    def concatenate(cls, parts: Sequence[Slices]) -> Slices:
        """The slices of the same query rows over several blocks, one after another in one buffer."""
        if not parts:
            pairs, positions = np.empty((0, 2), np.int64), np.empty(0, np.int32)
            return cls(pairs, pairs, pairs, positions, positions, pairs)
        first = np.cumsum([0] + [part.keys for part in parts])[:-1]
        return cls(
            np.concatenate([part.q_rows for part in parts]),
            np.concatenate([part.k_rows + offset for part, offset in zip(parts, first, strict=True)]),
            np.concatenate([part.bands for part in parts]),
            parts[0].q_positions,
            np.concatenate([part.k_positions for part in parts]),
            np.concatenate([part.sent_rows for part in parts]),
        )


def slices_between(queries: Geometry, own: int, keys: Geometry, peer: int, mask: Mask, queries_travel: bool = False) -> Slices:
    """The slices of rank `own`'s queries over rank `peer`'s keys; built once and owned by the queries' geometry.

    The keys travel, so the block has just those in reach; or the queries do, so that only those that see any key are there.
    """
    table = queries.tables.setdefault(keys, {}).setdefault(mask, {})
    key = own, peer, queries_travel and own != peer
    if key not in table:
        table[key] = _build(queries, own, keys, peer, mask, queries_travel)
    return table[key]


def slices_over(queries: Geometry, own: int, keys: Geometry, peers: tuple[int, ...], mask: Mask) -> Slices:
    """The slices of rank `own`'s queries over the key rows of several peers, one after another in one buffer."""
    table = queries.tables.setdefault(keys, {}).setdefault(mask, {})
    if (own, peers) not in table:
        table[own, peers] = Slices.concatenate([slices_between(queries, own, keys, peer, mask) for peer in peers])
    return table[own, peers]


def _build(queries: Geometry, own: int, keys: Geometry, peer: int, mask: Mask, queries_travel: bool) -> Slices:
    q, k = queries.holdings[own], keys.holdings[peer]
    shift = keys.lengths - queries.lengths  # aligns the ends of each document
    documents, q_start, q_stop = _clusters(q, mask)
    prefix = None if mask.prefix is None else np.array(mask.prefix, dtype=np.int64)
    first_key = np.zeros_like(documents) if prefix is None else prefix[documents]
    parts = [
        _in_reach(q, k, documents, q_start, q_stop, shift[documents] - mask.left, shift[documents] + mask.right, first_key)
    ]
    if prefix is not None:
        documents, first, last = q.runs
        unlimited = np.full_like(documents, UNLIMITED)
        bounds = (-unlimited, unlimited, np.zeros_like(documents), prefix[documents])
        parts.append(_in_reach(q, k, documents, q.offsets[first], q.offsets[last], *bounds))
    table = np.concatenate(parts, axis=1)
    q_start, q_stop, k_start, k_stop, low, high = table[:, np.argsort(table[2], kind="stable")]
    q_rows, k_rows, bands = (np.stack(pair, 1) for pair in ((q_start, q_stop), (k_start, k_stop), (low, high)))
    if own == peer:  # nothing travels: the block is all that the rank holds
        return Slices(q_rows, k_rows, bands, q.positions, k.positions, np.array([[0, k.tokens]]))
    if queries_travel:
        return _of_seeing_rows(Slices(q_rows, k_rows, bands, q.positions, k.positions, np.empty((0, 2), np.int64)))
    block = np.cumsum(k_stop - k_start)
    in_block = np.stack([block - (k_stop - k_start), block], 1)
    sent = k.positions[ranges(k_start, k_stop)]
    return Slices(q_rows, in_block, bands, q.positions, sent, _join(k_start, k_stop))


def _clusters(q: Holding, mask: Mask) -> tuple[Ints, Ints, Ints]:
    """(document, first row, one past the last row) of the stretches of query rows whose reach has no hole.

    Under a window the spans of a run may reach keys far apart; what lies between need not travel. Two spans belong to one
    stretch when the keys they reach overlap or touch: when the gap between them is no wider than the band.
    """
    band = mask.left + mask.right
    new_document = q.documents[1:] != q.documents[:-1]
    apart = new_document | (q.starts[1:] - q.stops[:-1] >= band + 1)
    first = np.r_[0, np.flatnonzero(apart) + 1][: q.documents.size]
    last = np.r_[first[1:], q.documents.size][: first.size]
    return q.documents[first], q.offsets[first], q.offsets[last]


def _in_reach(
    q: Holding,
    k: Holding,
    documents: Ints,
    q_start: Ints,
    q_stop: Ints,
    low: Ints,
    high: Ints,
    first_key: Ints,
    key_limit: Ints | int = UNLIMITED,
) -> Ints:
    """(6, n) q rows, k rows and band of the stretches that see any key, each trimmed to the rows that do."""
    k_start = k.rows_before(documents, np.maximum(first_key, q.positions[q_start] + low))
    k_stop = k.rows_before(documents, np.minimum(key_limit, q.positions[q_stop - 1] + high + 1))
    table = _nonempty(np.stack([q_start, q_stop, k_start, k_stop, low, high, documents]), 2)

    q_start, q_stop, k_start, k_stop, low, high, documents = table
    table[0] = np.maximum(q_start, q.rows_before(documents, k.positions[k_start] - high))
    table[1] = np.minimum(q_stop, q.rows_before(documents, k.positions[k_stop - 1] - low + 1))
    table = _nonempty(table, 0)

    q_start, q_stop, k_start, k_stop, low, high, documents = table
    table[2] = np.maximum(k_start, k.rows_before(documents, q.positions[q_start] + low))
    table[3] = np.minimum(k_stop, k.rows_before(documents, q.positions[q_stop - 1] + high + 1))
    return _nonempty(table, 2)[:6]


def _nonempty(table: Ints, start: int) -> Ints:
    return table[:, table[start + 1] > table[start]]


def _of_seeing_rows(slices: Slices) -> Slices:
    """The same slices over just those query rows that see any key."""
    seeing = np.zeros(slices.queries + 2, dtype=bool)  # with a row that does not at each end
    for i, (start, stop) in enumerate(slices.q_rows.tolist()):
        first, last = slices.visible(i)
        seeing[1 + start : 1 + stop] |= last > first
    edges = np.flatnonzero(seeing[1:] != seeing[:-1]).reshape(-1, 2)
    row = np.cumsum(seeing[:-1])  # the new number of each row
    positions = slices.q_positions[seeing[1:-1]]
    return replace(slices, q_rows=row[slices.q_rows], q_positions=positions, sent_rows=edges, lowered={})


def _join(starts: Ints, stops: Ints) -> Ints:
    """(m, 2) ascending ranges, those that touch joined."""
    apart = starts[1:] != stops[:-1]
    first, last = np.r_[True, apart][: starts.size], np.r_[apart, True][: starts.size]
    return np.stack([starts[first], stops[last]], 1)
