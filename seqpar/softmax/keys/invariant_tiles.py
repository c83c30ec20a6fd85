"""Tiles of queries, anchored at document positions, and the rank that computes each of them.

A tile is `TILE` positions of a document, counted from its start, so which rows a tile has, and
which keys they see, is the same on any number of ranks and in any layout. Each is computed whole by
one rank: that which holds it, or where several hold parts of it, one of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo
from seqpar.core.ranges import count_up, union
from seqpar.layout.cuts.cuts import Spans
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask, Slices, slices_between

TILE = 1024  # queries: with less, ATen's kernels on CPUs take smaller blocks


@dataclass(frozen=True, eq=False)
class AnchoredTiles:
    """All tiles of the queries of a pack, ascending by document and position.

    Attributes:
        documents, numbers: (n,) of each tile, its document, and which one it is in that.
        first_rows: (n + 1,) the index in the pack of each tile's first query, and at the end all.
        parts: (m, 7) its slices: tile, q_start, q_stop, k_start, k_stop, low and high. Queries are
            counted from the tile's first one, and keys in the pack. Tiles ascend.
        areas: (n,) how many (query, key) pairs see each other.
        k_starts, k_stops: (n,) the range of the pack with all keys that a tile sees; of one that
            sees none it is empty, behind or ahead of all.
        owners: (n,) the rank that computes it.
        moved: the layout of the queries in which each rank has those of its tiles; None if that is
            their own, which keeps these tiles.
    """

    documents: Ints
    numbers: Ints
    first_rows: Ints
    parts: Ints
    areas: Ints
    k_starts: Ints
    k_stops: Ints
    owners: Ints
    moved: Geometry | None

    @classmethod
    def of(cls, queries: Geometry, keys: Geometry, mask: Mask) -> AnchoredTiles:
        """Return the tiles of a call."""
        counts = -(-queries.lengths // TILE)
        documents, numbers = np.repeat(np.arange(counts.size), counts), count_up(counts)
        starts = numbers * TILE
        stops = np.minimum(starts + TILE, queries.lengths[documents])
        first_rows = np.r_[queries.cu_seqlens[documents] + starts, queries.tokens]
        parts, areas = _parts(_whole(queries, keys, mask), first_rows)
        owners, moved = _owners(queries, counts, areas), None
        if owners.cut:
            spans = Spans.of(queries.ranks, owners.ranks, documents, starts, stops)
            moved = Geometry(queries.cu_seqlens, spans)
        k_starts, k_stops = np.full(areas.size, keys.tokens), np.zeros(areas.size, np.int64)
        np.minimum.at(k_starts, parts[:, 0], parts[:, 3])
        np.maximum.at(k_stops, parts[:, 0], parts[:, 4])
        reach = k_starts, k_stops
        return cls(documents, numbers, first_rows, parts, areas, *reach, owners.ranks, moved)

    def parts_of(self, tile: int) -> Ints:
        """Return a tile's parts."""
        return self.parts[slice(*np.searchsorted(self.parts[:, 0], [tile, tile + 1]))]

    def key_ranges(self, tile: int) -> Ints:
        """Return (m, 2): ranges of the pack, ascending, with the keys that a tile sees."""
        starts, stops = self.parts_of(tile)[:, 3:5].T
        order = np.argsort(starts, kind="stable")
        return union(starts[order], stops[order])

    def slices(self, tile: int, queries: Geometry, keys: Geometry, mask: Mask) -> Slices:
        """Return the slices of a tile's queries over the block of the keys in its ranges."""
        whole, ranges = _whole(queries, keys, mask), self.key_ranges(tile)
        _, q_start, q_stop, k_start, k_stop, low, high = self.parts_of(tile).T
        lengths = ranges[:, 1] - ranges[:, 0]
        moved = ranges[:, 0] - (np.cumsum(lengths) - lengths)  # by which a range's keys do
        moved = moved[np.searchsorted(ranges[:, 1], k_stop)]
        rows = slice(*self.first_rows[[tile, tile + 1]])
        positions = [whole.k_positions[start:stop] for start, stop in ranges.tolist()]
        return replace(
            whole,
            q_rows=np.stack([q_start, q_stop], 1),
            k_rows=np.stack([k_start - moved, k_stop - moved], 1),
            bands=np.stack([low, high], 1),
            q_positions=whole.q_positions[rows],
            k_positions=positions[0] if len(positions) == 1 else np.concatenate(positions),
            sent_rows=ranges,
            q_aligned=whole.aligned[rows],
            derived=Memo(),
        )


def _whole(queries: Geometry, keys: Geometry, mask: Mask) -> Slices:
    """Return the slices of all queries over all keys, as if one rank had them."""
    merged = queries.merged_ranks(queries.ranks), keys.merged_ranks(keys.ranks)
    return slices_between(merged[0], 0, merged[1], 0, mask)


def _parts(whole: Slices, first_rows: Ints) -> tuple[Ints, Ints]:
    """Cut slices at the tiles' first rows; return the parts, and the area of each tile.

    Like every slice a part is trimmed to the rows that see a key, and to the keys that they see.
    """
    found, areas = list[tuple[int, ...]](), np.zeros(first_rows.size - 1, np.int64)
    for i, (q_start, q_stop) in enumerate(whole.q_rows.tolist()):
        start, stop = whole.key_intervals(i)
        k_start, band = int(whole.k_rows[i, 0]), whole.bands[i].tolist()
        tiles = np.searchsorted(first_rows, [q_start, q_stop - 1], side="right") - 1
        for tile in range(tiles[0], tiles[1] + 1):
            first = int(first_rows[tile])
            begin, end = max(q_start, first), min(q_stop, int(first_rows[tile + 1]))
            seen = stop[begin - q_start : end - q_start] - start[begin - q_start : end - q_start]
            seeing = np.flatnonzero(seen > 0)
            if seeing.size:
                areas[tile] += int(seen[seeing].sum())
                a, b = (begin - q_start + int(seeing[x]) for x in (0, -1))
                rows = q_start + a - first, q_start + b + 1 - first
                found.append((tile, *rows, k_start + int(start[a]), k_start + int(stop[b]), *band))
    parts = np.array(found, np.int64).reshape(-1, 7)
    return parts[np.argsort(parts[:, 0], kind="stable")], areas


@dataclass(frozen=True)
class _Owners:
    """(n,) the rank that computes each tile, and whether several ranks hold parts of some tile."""

    ranks: Ints
    cut: bool


def _owners(queries: Geometry, counts: Ints, areas: Ints) -> _Owners:
    """Give each tile to a rank that holds some of it: of several the one with the least area.

    Those that are cut are given away by their area, the largest first.
    """
    first, total = np.cumsum(counts) - counts, int(counts.sum())
    pairs = []
    for rank, holding in enumerate(queries.holdings):
        begin, end = holding.starts // TILE, -(-holding.stops // TILE)
        tiles = np.repeat(first[holding.documents] + begin, end - begin) + count_up(end - begin)
        pairs.append(np.unique(tiles) * queries.ranks + rank)
    tiles, ranks = np.divmod(np.sort(np.concatenate(pairs)), queries.ranks)
    edges = np.searchsorted(tiles, np.arange(total + 1))
    holders = np.diff(edges)
    owners = ranks[edges[:-1]]
    whole, cut = np.flatnonzero(holders == 1), np.flatnonzero(holders > 1)
    loads = np.bincount(owners[whole], weights=areas[whole], minlength=queries.ranks)
    for tile in cut[np.argsort(-areas[cut], kind="stable")].tolist():
        candidates = ranks[edges[tile] : edges[tile + 1]]
        owners[tile] = candidates[np.argmin(loads[candidates])]
        loads[owners[tile]] += areas[tile]
    return _Owners(owners, bool(cut.size))
