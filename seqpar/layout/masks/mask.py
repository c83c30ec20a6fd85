"""`Mask` and `Slices`: which query attends to which key.

A *slice* is a range of query rows and a range of key rows of one document, with a *band* lo ≤ k_pos
− q_pos ≤ hi. A query of the slice attends to the keys of the slice whose positions lie in the band.
Slices do not overlap. The number of slices grows with the number of documents on each rank, or with
the number of ranges of the mask on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import Ints, WindowSize, as_bool, parse_window
from seqpar.core.compiling import outside_graphs
from seqpar.core.device_tables import on_device
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.core.ranges import UNLIMITED, rows_before, take_ranges, union
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.masks.mask_ranges import MaskRanges, RangeList
from seqpar.layout.masks.slices_of_band import in_reach, of_band
from seqpar.layout.plot import DrawnLayout, plot_masks

_MAX_DISTANCE = 2**31 - 1  # between two int32 positions
Positions = NDArray[np.int32]


@dataclass(frozen=True)
class Mask:
    """The rule that says to which keys of its document a query attends.

    A query at position i attends to the keys at the positions i − left … i + right, and to the
    first `prefix` keys. `left` and `right` may be `UNLIMITED`. `prefix` is None, or has one number
    for each document. If the mask has `ranges`, only the ranges determine to which keys a query
    attends.

    A document may have L_q queries and a different number of keys, L_kv. The last query and the
    last key are then aligned: query i is treated as if its position were i + L_kv − L_q.
    """

    left: int
    right: int
    prefix: tuple[int, ...] | None = None
    ranges: MaskRanges | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.left, self.right, self.prefix or (), self.ranges))

    def __getstate__(self) -> dict[str, object]:
        # `_hash` is not pickled, because hashes of strings differ between processes.
        return {name: x for name, x in vars(self).items() if name != "_hash"}

    def __hash__(self) -> int:
        return self._hash  # cached, because masks are keys of tables, and a prefix may be long

    @classmethod
    def of(
        cls, causal: bool, window_size: WindowSize, prefix_lens: Ints | None, keys: Geometry
    ) -> Mask:
        """Return the mask for the arguments of a call. Raise a ValueError that names a wrong
        argument.
        """
        bounds = parse_window(window_size)
        left, right = (UNLIMITED if bound == -1 else bound for bound in bounds)
        if as_bool("causal", causal):
            right = 0
        if prefix_lens is None:
            return cls(left, right)
        if prefix_lens.shape != keys.lengths.shape:
            expected, found = keys.lengths.size, prefix_lens.size
            raise ValueError(f"prefix_lens must have one entry a document, {expected}, got {found}")
        wrong = (prefix_lens < 0) | (prefix_lens > keys.lengths)
        if wrong.any():
            i = int(np.argmax(wrong))
            limits = f"0 to {keys.lengths[i]} (the document)"
            raise ValueError(f"prefix_lens[{i}] must lie in {limits}, got {prefix_lens[i]}")
        return cls(left, right, tuple(prefix_lens.tolist()))

    @classmethod
    @outside_graphs
    def of_ranges(cls, ranges: RangeList) -> Mask:
        """Return the mask with exactly the (query, key) pairs of these ranges.

        In a range (document, q_start, q_stop, k_start, k_stop, low, high), the queries q_start …
        q_stop − 1 of a document attend to its keys k_start … k_stop − 1 for which low ≤ k_pos −
        q_pos ≤ high. For `low` and `high`, None means no limit. Positions of queries are counted
        among the queries of the document, and positions of keys among its keys. If a document has
        different numbers of queries and keys, the last query and the last key are not aligned.

        `ranges` is a list of tuples in any order, or (n, 7) integers. Ranges without any pair are
        dropped. A query that is in no range attends to no key, and its out is 0.

        This takes time n log n for n ranges. docs/guides/masks.md describes an exception. A
        ValueError names a wrong range, or two ranges that contain the same pair, because this pair
        would count twice.
        """
        return cls(UNLIMITED, UNLIMITED, ranges=MaskRanges.of(ranges))

    def check_fits(self, queries: Geometry, keys: Geometry) -> None:
        if self.prefix is not None and len(self.prefix) != keys.lengths.size:
            expected = f"a prefix of {keys.lengths.size} documents"
            raise ValueError(f"mask must have {expected}, got {len(self.prefix)}")
        if self.ranges is not None:
            self.ranges.check_fits(queries, keys)

    @outside_graphs
    def visible(self, geometry: Geometry) -> NDArray[np.bool_]:
        """Return whether each query (row) attends to each key (column), (T, T), for a small
        batch.
        """
        cu = geometry.cu_seqlens
        document = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
        position = np.arange(geometry.tokens) - cu[document]
        distance = position - position[:, None]
        visible = (distance >= -self.left) & (distance <= self.right)
        if self.prefix is not None:
            visible |= position < np.array(self.prefix, dtype=np.int64)[document][:, None]
        visible &= document == document[:, None]
        if self.ranges is not None:
            visible = np.zeros_like(visible)
            for number, q0, q1, k0, k1, low, high in zip(*self.ranges.columns, strict=True):
                q, k = (slice(*(cu[number] + edges)) for edges in ([q0, q1], [k0, k1]))
                visible[q, k] |= (distance[q, k] >= low) & (distance[q, k] <= high)
        return visible

    @outside_graphs
    def plot(self, path: str | Path, layout: DrawnLayout) -> None:
        """Draw which query attends to which key of a packed batch into the file `path`.

        Each visible pair has the colour of the query's rank. The layout may have at most 2,000
        tokens. `seqpar.layout.plot.plot_masks({name: mask}, layout, path)` draws several masks side
        by side. Requires matplotlib.
        """
        plot_masks({"": self}, layout, path)


@dataclass(eq=False)
class Slices:
    """Which queries of one block attend to which keys of another block, as a list of slices.

    A *slice* is a range of query rows and a range of key rows of one document, with a range of
    allowed distances between their positions. A block that is received from another rank has only
    the rows that belong to some (query, key) pair. A block of the rank itself has all of its rows.
    """

    q_rows: Ints  # (n, 2): the range of query rows of each slice
    k_rows: Ints
    bands: Ints  # (n, 2): lo and hi of each slice
    q_positions: Positions  # (T_q,): the position of each query row
    k_positions: Positions  # (T_k,): the position of each key row
    sent_rows: Ints  # (m, 2): local rows of the block that is sent; of the keys if none is sent
    derived: Memo = field(default_factory=Memo, repr=False)  # tables of backends
    q_aligned: Positions | None = None  # `aligned`, or None if it equals `q_positions`
    # 0, or a limit for the number of runs (`most_documents`). Kernels pad their tables to this
    # number, so that the same kernels are launched for all documents.
    most_runs: int = 0

    def __len__(self) -> int:
        return len(self.q_rows)

    @cached_property
    def are_computed(self) -> bool:
        """Whether kernels are launched for these slices. With padded tables, kernels are launched
        even if there is no visible pair.
        """
        return len(self) > 0 or (self.most_runs > 0 and self.key_rows > 0)

    @property
    def key_rows(self) -> int:
        return self.k_positions.size

    @property
    def query_rows(self) -> int:
        return self.q_positions.size

    @property
    def aligned(self) -> Positions:
        """The position of each query row, counted among the keys of its document, (T_q,)."""
        return self.q_positions if self.q_aligned is None else self.q_aligned

    def key_intervals(self, i: int) -> tuple[Ints, Ints]:
        """Return the range of key rows to which each query row of slice i attends.

        A *slice* is a range of query rows and a range of key rows. Returns the starts and the stops
        of the ranges, (rows,) each. Key rows are counted from the first key of the slice.
        """
        q_positions = self.q_positions[slice(*self.q_rows[i])].astype(np.int64)
        k_positions = self.k_positions[slice(*self.k_rows[i])]
        low, high = self.bands[i]
        start = np.searchsorted(k_positions, q_positions + low, side="left")
        return start, np.searchsorted(k_positions, q_positions + high, side="right")

    @cached_property
    def full(self) -> NDArray[np.bool_]:
        """Whether all queries of each slice attend to all keys of the slice, (n,).

        Most slices between different ranks are full.
        """
        full = np.zeros(len(self), dtype=bool)
        has_pairs = (np.diff(self.q_rows) > 0)[:, 0] & (np.diff(self.k_rows) > 0)[:, 0]
        q_rows, k_rows = self.q_rows[has_pairs], self.k_rows[has_pairs]
        # Positions ascend within a slice.
        first_query, last_query = self.q_positions[q_rows - [0, 1]].astype(np.int64).T
        first_key, last_key = self.k_positions[k_rows - [0, 1]].astype(np.int64).T
        low, high = self.bands[has_pairs].T
        full[has_pairs] = (low <= first_key - last_query) & (last_key - first_query <= high)
        return full

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Return two counts for each slice: all visible pairs, and the visible pairs of query rows
        that do not attend to the first key of the slice.
        """
        areas = (np.diff(self.q_rows) * np.diff(self.k_rows))[:, 0]
        pairs = [(area, 0) for area in areas.tolist()]
        for i in np.flatnonzero(~self.full).tolist():
            start, stop = self.key_intervals(i)
            counts = stop - start
            pairs[i] = int(counts.sum()), int(counts[start > 0].sum())
        return pairs

    def mask(self, rows: slice, keys: slice, band: Sequence[int], device: torch.device) -> Tensor:
        """Return whether a band lets each query row attend to each key row, (queries, keys)
        bool.
        """
        q_positions, k_positions = self.positions_on(device)
        distance = k_positions[keys] - q_positions[rows, None]
        low, high = np.clip(band, -_MAX_DISTANCE, _MAX_DISTANCE).tolist()
        return (distance >= low).logical_and_(distance <= high)

    def positions_on(self, device: torch.device) -> list[Tensor]:
        host = self.q_positions, self.k_positions
        tables = self.derived("positions", lambda: [torch.from_numpy(x) for x in host])
        return [on_device(x, device) for x in tables]

    @cached_property
    def area(self) -> int:
        return sum(visible for visible, _ in self.pairs)

    @property
    def seeing(self) -> Ints:
        """Ranges of the query rows that attend to some key, (m, 2)."""
        # False at both ends, so that all ranges have edges
        seeing = np.zeros(self.query_rows + 2, dtype=bool)
        for i, (start, stop) in enumerate(self.q_rows.tolist()):
            first, last = self.key_intervals(i)
            seeing[1 + start : 1 + stop] |= last > first
        return np.flatnonzero(seeing[1:] != seeing[:-1]).reshape(-1, 2)

    def of_queries(self, rows: Ints) -> Slices:
        """Return these slices over a subset of the query rows. `rows` must contain all query rows
        of the slices.
        """
        return replace(
            self,
            q_rows=rows_before(rows, self.q_rows),
            q_positions=take_ranges(self.q_positions, rows),
            q_aligned=take_ranges(self.aligned, rows),
            sent_rows=rows,
            derived=Memo(),
        )

    def of_keys(self, rows: Ints) -> Slices:
        """Return these slices over a subset of the key rows. `rows` must contain all key rows of
        the slices.
        """
        k_rows, positions = rows_before(rows, self.k_rows), take_ranges(self.k_positions, rows)
        return replace(self, k_rows=k_rows, k_positions=positions, sent_rows=rows, derived=Memo())

    @classmethod
    def of(cls, table: Ints, q: Holding, k: Holding, shift: Ints, sent_rows: Ints) -> Slices:
        """Return slices from an array (6, n) of q start and stop, k start and stop, lo and hi.

        `shift` (documents,) is added to the positions of queries to align them with the keys.
        """
        table = table[:, np.argsort(table[2], kind="stable")]
        q_rows, k_rows, bands = (np.stack([table[i], table[i + 1]], 1) for i in (0, 2, 4))
        rows, positions = (q_rows, k_rows, bands), (q.positions, k.positions)
        return cls(*rows, *positions, sent_rows, q_aligned=q.aligned(shift))

    @classmethod
    def concatenate(cls, parts: Sequence[Slices]) -> Slices:
        """Join the slices of the same query rows over several blocks of keys into slices over one
        block, which contains the keys of all blocks.
        """
        if not parts:
            pairs, positions = np.empty((0, 2), np.int64), np.empty(0, np.int32)
            return cls(pairs, pairs, pairs, positions, positions, pairs)
        first = np.cumsum([0] + [part.key_rows for part in parts])[:-1]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("q_rows", "k_rows", "bands", "k_positions", "sent_rows")
        }
        columns["k_rows"] += np.repeat(first, [len(part) for part in parts])[:, None]
        return replace(parts[0], **columns, derived=Memo())


def slices_between(
    queries: Geometry,
    q_rank: int,
    keys: Geometry,
    k_rank: int,
    mask: Mask,
    queries_travel: bool = False,
) -> Slices:
    """Return the slices of a mask between the queries of one rank and the keys of another rank.

    A *slice* is a range of query rows and a range of key rows of one document, with a *band*, a
    range of allowed distances k_pos − q_pos. The slices are cached in `queries` and `keys`. By
    default, keys are sent, and the result has only the keys to which some query attends. With
    `queries_travel`, queries are sent, and the result has only the queries that attend to some key.
    """
    queries_travel = queries_travel and q_rank != k_rank

    def build() -> Slices:
        slices = travelling = local_slices(queries, q_rank, keys, k_rank, mask)
        if keys.cut.most_documents:
            slices = replace(slices, most_runs=2 * keys.lengths.size + keys.ranks)
        if q_rank == k_rank:
            return slices
        if queries_travel:
            return slices.of_queries(slices.seeing)
        if keys.cut.most_documents:
            worst = queries.worst_case, keys.worst_case
            travelling = local_slices(worst[0], q_rank, worst[1], k_rank, mask)
        return slices.of_keys(union(*travelling.k_rows.T))

    return _tables(queries, keys, mask)(("slices", q_rank, k_rank, queries_travel), build)


def local_slices(queries: Geometry, q_rank: int, keys: Geometry, k_rank: int, mask: Mask) -> Slices:
    q, k = queries.holdings[q_rank], keys.holdings[k_rank]
    shift = keys.lengths - queries.lengths
    if mask.ranges is None:
        table = of_band(q, k, shift, mask.left, mask.right, mask.prefix)
    else:
        of_rank = partial(mask.ranges.columns.of_queries, q)
        rows, own = _tables(queries, keys, mask)(("ranges of", q_rank), of_rank)
        runs = own.documents, own.documents
        bands, key_edges = (own.lows, own.highs), (own.k_starts, own.k_stops)
        table = in_reach(q, k, runs, rows, bands, key_edges)
    return Slices.of(table, q, k, shift, np.array([[0, k.tokens]]))


def slices_over(
    queries: Geometry, q_rank: int, keys: Geometry, k_ranks: tuple[int, ...], mask: Mask
) -> Slices:
    def build() -> Slices:
        parts = [slices_between(queries, q_rank, keys, k_rank, mask) for k_rank in k_ranks]
        return Slices.concatenate(parts)

    return _tables(queries, keys, mask)(("slices over", q_rank, k_ranks), build)


def _tables(queries: Geometry, keys: Geometry, mask: Mask) -> Memo:
    masks = queries.derived_with(keys)(("masks",), lambda: Memo(MAX_KEPT_SETTINGS))
    return masks(mask, Memo)


@dataclass(eq=False)
class Blocks:
    """The slices of one block of queries over several blocks of keys, in the order of their
    arrival.
    """

    slices: Sequence[Slices]  # one element per block of keys
    # Tables of backends for all slices together.
    derived: Memo = field(default_factory=Memo, repr=False)


# Long slices are cut at multiples of this number of rows, so that kernels have full tiles.
_TILE_ROWS = 128
# Slices of at most this number of rows are not cut. With few keys, libraries for matrix products
# add the terms of a score in a different order (with 8 keys in MKL on an AMD EPYC). The scores that
# backward computes for half a slice would then differ from the scores that forward computed for the
# whole slice.
_WHOLE_ROWS = 32


def halves(slices: Slices) -> tuple[Slices, Slices]:
    """Cut each slice into two halves with about equal numbers of pairs. Return the first halves and
    the second halves. Short slices are not cut.
    """
    # Each slice is cut in half separately. If the list of slices was cut in half, the result of a
    # document would depend on the other documents of the batch.
    lengths = np.diff(slices.q_rows)[:, 0]
    queries, keys = (np.stack([x, x], axis=1) for x in (slices.q_rows, slices.k_rows))
    queries[:, 0, 1] = queries[:, 1, 0] = slices.q_rows[:, 0] + _middle(lengths)
    is_cut = lengths > _WHOLE_ROWS
    queries[~is_cut, 0] = slices.q_rows[~is_cut]
    for i in np.flatnonzero(~slices.full & is_cut).tolist():
        interval = slices.key_intervals(i)
        row = _row(*interval)
        for part, rows in enumerate([(0, row), (row, None)]):
            queries[i, part], keys[i, part] = _part(slices, i, *interval, rows)

    def half(part: int, chosen: NDArray[np.bool_]) -> Slices:
        rows, bands = (queries[chosen, part], keys[chosen, part]), slices.bands[chosen]
        return replace(slices, q_rows=rows[0], k_rows=rows[1], bands=bands, derived=Memo())

    return half(0, np.ones_like(is_cut)), half(1, is_cut)


def _middle(lengths: Ints) -> Ints:
    """Return, for slices in which all queries attend to all keys, the row at which a slice is cut
    in half.
    """
    step = np.clip(lengths // 2, 1, _TILE_ROWS)
    below = lengths // (2 * step)
    above_is_closer = 2 * step * (below + 1) - lengths < lengths - 2 * step * below
    return (below + above_is_closer) * step


def _row(start: Ints, stop: Ints) -> int:
    """Return the query row at which to cut a slice into two halves with about the same work.

    The work is the number of (query, key) pairs. Query i attends to the keys start[i] … stop[i] −
    1. In long slices, the result is a multiple of the number of rows that kernels compute together.
    """
    step = min(_TILE_ROWS, start.size // 2)
    reached = np.cumsum(stop - start)[step - 1 : -1 : step]
    return (int(np.argmin(np.abs(reached - (stop - start).sum() / 2))) + 1) * step


def _part(
    slices: Slices, i: int, start: Ints, stop: Ints, rows: tuple[int | None, int | None]
) -> tuple[Ints, Ints]:
    """Return the query rows and the key rows of slice i between two query rows, without rows that
    have no pair.
    """
    seeing = np.flatnonzero(stop[slice(*rows)] > start[slice(*rows)])[[0, -1]] + (rows[0] or 0)
    first, last = seeing
    return slices.q_rows[i, 0] + [first, last + 1], slices.k_rows[i, 0] + [start[first], stop[last]]
