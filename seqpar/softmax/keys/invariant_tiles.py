"""Tiles of queries that begin at fixed positions of a document, and the rank that computes each.

A tile is `TILE` positions of a document, counted from its start. Its rows, and the keys that they
attend to, are therefore the same on any number of ranks and in any layout. One rank computes a
whole tile. If several ranks hold parts of it, it is one of these ranks.
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

# Queries per tile. ATen's CPU kernels use blocks of 256 queries from 768 on. Each tile writes and
# adds its contribution to dk and dv once, which costs more with smaller tiles. Larger tiles leave
# ranks without work in short documents.
TILE = 1024


@dataclass(frozen=True, eq=False)
class AnchoredTiles:
    """All tiles of the queries of a pack, ascending by document and position.

    Attributes:
        documents, numbers: (n,) the document of each tile, and the tile's number in it.
        first_rows: (n + 1,) the index in the pack of each tile's first query, then the number of
            all queries.
        parts: (m, 7) the tiles' slices: tile, q_start, q_stop, k_start, k_stop, low and high.
            Queries are counted from the tile's first one, and keys in the pack. Tiles ascend.
        areas: (n,) how many (query, key) pairs each tile has.
        k_starts, k_stops: (n,) a range of the pack with all keys that a tile attends to. For a
            tile without keys it is empty: k_start is the number of all keys, and k_stop 0.
        owners: (n,) the rank that computes each tile.
        moved: a layout of the queries in which each rank holds the rows of its tiles, or None if no
            tile is divided between ranks.
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
        return cls(
            documents, numbers, first_rows, parts, areas, k_starts, k_stops, owners.ranks, moved
        )

    def parts_of(self, tile: int) -> Ints:
        return self.parts[slice(*np.searchsorted(self.parts[:, 0], [tile, tile + 1]))]

    def key_ranges(self, tile: int) -> Ints:
        """Return (m, 2): ascending ranges of the pack with the keys that a tile attends to."""
        starts, stops = self.parts_of(tile)[:, 3:5].T
        order = np.argsort(starts, kind="stable")
        return union(starts[order], stops[order])

    def slices(self, tile: int, queries: Geometry, keys: Geometry, mask: Mask) -> Slices:
        """Return the slices of a tile's queries over a block with the keys of its ranges."""
        whole, ranges = _whole(queries, keys, mask), self.key_ranges(tile)
        _, q_start, q_stop, k_start, k_stop, low, high = self.parts_of(tile).T
        lengths = ranges[:, 1] - ranges[:, 0]
        shifts = ranges[:, 0] - (np.cumsum(lengths) - lengths)  # from the block to the pack
        shifts = shifts[np.searchsorted(ranges[:, 1], k_stop)]
        rows = slice(*self.first_rows[[tile, tile + 1]])
        positions = [whole.k_positions[start:stop] for start, stop in ranges.tolist()]
        return replace(
            whole,
            q_rows=np.stack([q_start, q_stop], 1),
            k_rows=np.stack([k_start - shifts, k_stop - shifts], 1),
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

    Like every slice, a part is trimmed to the rows that have keys, and to the keys that have rows.
    """
    table, areas = list[tuple[int, ...]](), np.zeros(first_rows.size - 1, np.int64)
    for i, (q_start, q_stop) in enumerate(whole.q_rows.tolist()):
        start, stop = whole.key_intervals(i)
        k_start, band = int(whole.k_rows[i, 0]), whole.bands[i].tolist()
        tiles = np.searchsorted(first_rows, [q_start, q_stop - 1], side="right") - 1
        for tile in range(tiles[0], tiles[1] + 1):
            first = int(first_rows[tile])
            begin, end = max(q_start, first), min(q_stop, int(first_rows[tile + 1]))
            of_tile = slice(begin - q_start, end - q_start)
            key_counts = stop[of_tile] - start[of_tile]
            with_keys = np.flatnonzero(key_counts > 0)
            if with_keys.size:
                areas[tile] += int(key_counts[with_keys].sum())
                a, b = (begin - q_start + int(with_keys[x]) for x in (0, -1))
                rows = q_start + a - first, q_start + b + 1 - first
                table.append((tile, *rows, k_start + int(start[a]), k_start + int(stop[b]), *band))
    parts = np.array(table, np.int64).reshape(-1, 7)
    return parts[np.argsort(parts[:, 0], kind="stable")], areas


@dataclass(frozen=True)
class _Owners:
    ranks: Ints  # (n,) the rank that computes each tile
    cut: bool  # whether several ranks hold parts of some tile


def _owners(queries: Geometry, counts: Ints, areas: Ints) -> _Owners:
    """Give each tile to a rank that holds some of it.

    Tiles that several ranks hold are assigned by area, the largest first, to the rank with the
    smallest area so far.
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
