"""The plan of `deterministic="ranks"`: which rank computes which queries.

A *tile* is `TILE` consecutive queries of a document, counted from the document's start. The rows of
a tile, and the keys to which the rows attend, are therefore the same on any number of ranks and in
any layout. One rank computes a whole tile. If several ranks hold rows of a tile, one of these ranks
computes the tile, and the others send their rows to this rank. A `TilePlan` has the messages and
the work of one rank.

The *pack* is the packed batch. The *pool* of a rank is the keys to which its tiles attend and the
keys that it holds itself, in the order of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.core.ranges import as_ranges, count_up, ranges, take_ranges, union
from seqpar.core.traffic import Traffic
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask, Slices, slices_between
from seqpar.layout.reshard import share
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.key_plan import Distances, KeyPlan, key_traffic
from seqpar.softmax.wire.row_messages import Rows

# Queries per tile. From 768 queries on, ATen's CPU kernel computes 256 queries at a time. Each tile
# adds its contribution to dk and dv once, so smaller tiles cost more in total. Larger tiles leave
# ranks without work if documents are short.
TILE = 1024


@dataclass(frozen=True, eq=False)
class RankInvariantTiles:
    """All tiles of a packed batch, ordered by document and position. One rank computes each tile.

    A *tile* is a fixed number of consecutive queries of a document, counted from the start of the
    document. The *pack* is the packed batch.

    Attributes:
        documents: (n,). The document of each tile.
        numbers: (n,). The index of each tile in its document.
        first_rows: (n + 1,). The index in the pack of each tile's first query. The last entry is
            the number of all queries.
        parts: (m, 7). Ranges of queries and keys that attend to each other, ordered by tile. The
            columns are tile, q_start, q_stop, k_start, k_stop, low and high. A pair of a range is
            allowed if low ≤ k_pos − q_pos ≤ high. Queries are counted from the tile's first query,
            and keys from the start of the pack.
        areas: (n,). How many (query, key) pairs each tile has.
        k_starts, k_stops: (n,). A range of the pack that contains all keys of a tile. For a tile
            without keys, k_start is the number of all keys and k_stop is 0.
        owners: (n,). The rank that computes each tile.
        moved: a layout of the queries in which each rank holds the rows of its tiles. None if each
            tile is already on one rank.
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
    def of(cls, queries: Geometry, keys: Geometry, mask: Mask) -> RankInvariantTiles:
        counts = -(-queries.lengths // TILE)
        documents, numbers = np.repeat(np.arange(counts.size), counts), count_up(counts)
        starts = numbers * TILE
        stops = np.minimum(starts + TILE, queries.lengths[documents])
        first_rows = np.r_[queries.cu_seqlens[documents] + starts, queries.tokens]
        parts, areas = _parts(_whole(queries, keys, mask), first_rows)
        (owners, is_cut), moved = _owners(queries, counts, areas), None
        if is_cut:
            spans = Spans.of(queries.ranks, owners, documents, starts, stops)
            moved = Geometry(queries.cu_seqlens, spans)
        k_starts, k_stops = np.full(areas.size, keys.tokens), np.zeros(areas.size, np.int64)
        np.minimum.at(k_starts, parts[:, 0], parts[:, 3])
        np.maximum.at(k_stops, parts[:, 0], parts[:, 4])
        return cls(documents, numbers, first_rows, parts, areas, k_starts, k_stops, owners, moved)

    def parts_of(self, tile: int) -> Ints:
        return self.parts[slice(*np.searchsorted(self.parts[:, 0], [tile, tile + 1]))]

    def key_ranges(self, tile: int) -> Ints:
        """Return the keys to which a tile attends, as ascending ranges of the packed batch, (m,
        2).
        """
        starts, stops = self.parts_of(tile)[:, 3:5].T
        order = np.argsort(starts, kind="stable")
        return union(starts[order], stops[order])

    def slices(self, tile: int, queries: Geometry, keys: Geometry, mask: Mask) -> Slices:
        """Return the slices of a tile's queries over a block of keys.

        The block has only the keys to which the tile attends, in the order of the packed batch.
        """
        whole, ranges = _whole(queries, keys, mask), self.key_ranges(tile)
        _, q_start, q_stop, k_start, k_stop, low, high = self.parts_of(tile).T
        lengths = ranges[:, 1] - ranges[:, 0]
        # Add this to a row of the block to get its row in the pack.
        shifts = ranges[:, 0] - (np.cumsum(lengths) - lengths)
        shifts = shifts[np.searchsorted(ranges[:, 1], k_stop)]
        rows = slice(*self.first_rows[[tile, tile + 1]])
        return replace(
            whole,
            q_rows=np.stack([q_start, q_stop], 1),
            k_rows=np.stack([k_start - shifts, k_stop - shifts], 1),
            bands=np.stack([low, high], 1),
            q_positions=whole.q_positions[rows],
            k_positions=take_ranges(whole.k_positions, ranges),
            sent_rows=ranges,
            q_aligned=whole.aligned[rows],
            derived=Memo(),
        )


def _whole(queries: Geometry, keys: Geometry, mask: Mask) -> Slices:
    """Return the slices of all queries over all keys, as if one rank held them."""
    merged = queries.merged_ranks(queries.ranks), keys.merged_ranks(keys.ranks)
    return slices_between(merged[0], 0, merged[1], 0, mask)


def _parts(whole: Slices, first_rows: Ints) -> tuple[Ints, Ints]:
    """Cut the slices of all queries so that the queries of each part are in one tile.

    A *slice* is a range of query rows and a range of key rows. A *tile* is a fixed number of
    consecutive queries of a document. Returns the table of the parts (`RankInvariantTiles.parts`),
    and how many (query, key) pairs each tile has.
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


def _owners(queries: Geometry, counts: Ints, areas: Ints) -> tuple[Ints, bool]:
    """Return the rank that computes each tile, (n,), and whether any tile has rows on several
    ranks.

    A *tile* is a range of queries of a document, and its area is the number of its (query, key)
    pairs. Tiles with rows on several ranks are assigned one by one, beginning with the largest
    area. Of the ranks that hold rows of a tile, the rank whose tiles have the smallest total area
    so far computes the tile.
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
    return owners, bool(cut.size)


class Unit(NamedTuple):
    number: int  # the index of the tile in its document
    rows: slice  # the tile's queries, counted among the queries of the rank's tiles
    # Ranges of the pool. Joined, they are the block of keys to which the slices refer.
    keys: list[slice]
    slices: Slices  # slices of the tile's queries over this block
    # How many blocks of keys must have arrived. The rank's own keys are the first block.
    ready: int


class Node(NamedTuple):
    """A subtree of the binary tree along which gradients are added over the tiles of a document.

    One rank computes all tiles of the subtree.
    """

    document: int
    number: int  # the index of the subtree's first tile in its document
    tiles: tuple[int, int]  # the range of the subtree's tiles among all tiles
    keys: tuple[int, int]  # a range of the pack that contains all keys of these tiles


class KeyGradientShare(NamedTuple):
    """The contribution of one `Node` to the gradients of the keys of one rank."""

    node: int  # the index of the node among the nodes of the rank that computes it
    document: int
    number: int
    # The rows of the gradients. On the rank that computes the node, they are counted in the pool.
    # On the rank that holds the keys, they are counted among its local rows.
    places: Rows


@dataclass(frozen=True, eq=False)
class TilePlan:
    # As in `RankInvariantTiles`.
    moved: Geometry | None
    pool: int  # how many keys the pool has
    # whether no query attends to some keys of the pool, so that these keys never arrive
    blank: bool
    arrivals: list[Rows]  # the rows of the pool in each block of keys, this rank's own block first
    nodes: list[list[Unit]]  # the tiles of each subtree that this rank computes
    sent: list[list[KeyGradientShare]]  # for each rank, the gradients that this rank sends to it
    # For each rank, the gradients that this rank receives from it.
    received: list[list[KeyGradientShare]]

    @classmethod
    def of(cls, call: ResolvedCall, distances: Distances) -> TilePlan:
        tiles, keys, rank = tiles_of(call), call.kv_layout, call.rank
        tiled = call.altered(layout=tiles.moved or call.layout)
        own = np.flatnonzero(tiles.owners == rank)
        held = keys.token_indices(rank)
        blocks = [held]
        for step in KeyPlan(tiled, distances, every_step=True).steps:
            keys_of_peers = [_travelling(tiled, peer, rank) for peer in step.source]
            blocks.append(np.concatenate(keys_of_peers) if keys_of_peers else held[:0])
        attended = [ranges(*tiles.key_ranges(tile).T) for tile in own.tolist()]
        arrived = np.concatenate(blocks)
        pool = np.unique(np.concatenate([arrived, *attended]))
        arrivals = [_places(pool, block) for block in blocks]
        step_of = np.zeros(pool.size, np.int64)
        for number, block in enumerate(blocks):
            step_of[np.searchsorted(pool, block)] = number
        units, row = dict[int, Unit](), 0
        for tile in own.tolist():
            rows = slice(row, row := row + int(np.diff(tiles.first_rows[tile : tile + 2])[0]))
            if not tiles.areas[tile]:
                continue
            unit_keys = [slice(*part) for part in np.searchsorted(pool, tiles.key_ranges(tile))]
            ready = 1 + max(int(step_of[part].max()) for part in unit_keys)
            slices = tiles.slices(tile, call.layout, keys, call.mask)
            units[tile] = Unit(int(tiles.numbers[tile]), rows, unit_keys, slices, ready)
        nodes, own_nodes = [], nodes_of(tiles, rank)
        for node in own_nodes:
            nodes.append([units[tile] for tile in range(*node.tiles) if tile in units])
        sent, received = [], []
        for peer in range(call.ranks):
            sent.append(_shares(own_nodes, _travelling(tiled, peer, rank), pool))
            travelled = _travelling(tiled, rank, peer)
            received.append(_shares(nodes_of(tiles, peer), travelled, held))
        blank = pool.size > np.unique(arrived).size
        return cls(tiles.moved, pool.size, blank, arrivals, nodes, sent, received)


def tiles_of(call: ResolvedCall) -> RankInvariantTiles:
    return call.once(
        ("tiles",), lambda: RankInvariantTiles.of(call.layout, call.kv_layout, call.mask)
    )


def nodes_of(tiles: RankInvariantTiles, rank: int) -> list[Node]:
    """Return the largest subtrees in which `rank` computes all tiles that attend to any keys."""
    with_keys = tiles.areas > 0
    own = np.r_[0, np.cumsum(with_keys & (tiles.owners == rank))]
    others = np.r_[0, np.cumsum(with_keys & (tiles.owners != rank))]
    nodes = list[Node]()

    def cover(first: int, start: int, size: int, stop: int) -> None:
        """Find the nodes in the subtree of the tiles `start` … `start + size − 1`, and add them to
        the list.

        A *tile* is a range of queries of a document, and the tree adds up the gradients of all
        tiles of a document. A *node* is a subtree in which this rank computes all tiles, and which
        is not part of a larger subtree of this kind. The document has the tiles `first` … `stop −
        1`, and the subtree has no tiles after the end of the document.
        """
        end = min(start + size, stop)
        if start >= end or own[end] == own[start]:
            return
        if others[end] > others[start]:
            cover(first, start, size // 2, stop)
            cover(first, start + size // 2, size // 2, stop)
            return
        keys = int(tiles.k_starts[start:end].min()), int(tiles.k_stops[start:end].max())
        nodes.append(Node(int(tiles.documents[first]), start - first, (start, end), keys))

    documents = np.unique(tiles.documents[with_keys & (tiles.owners == rank)])
    edges = np.searchsorted(tiles.documents, [documents, documents + 1]).T
    for first, stop in edges.tolist():
        cover(first, first, 1 << (stop - first - 1).bit_length(), stop)
    return nodes


def tile_areas(call: ResolvedCall, rank: int, distances: Distances) -> list[int]:
    """Return a list with one number: the (query, key) pairs of a rank's tiles times query heads."""
    tiles = tiles_of(call)
    return [int(tiles.areas[tiles.owners == rank].sum()) * call.shape.heads]


def tile_traffic(call: ResolvedCall, rank: int, distances: Distances) -> list[Traffic]:
    """Return the sizes of the messages that a rank sends.

    A *tile* is a range of queries whose attention one rank computes. In step 0, the rank sends rows
    of tiles that another rank computes. In the following steps, it sends keys. In the last step, it
    sends results of tiles, and gradients of keys, to the ranks that hold the rows.
    """
    tiles, shape, last = tiles_of(call), call.shape, len(distances) + 1
    tiled = call.altered(layout=tiles.moved or call.layout, rank=rank)
    element, accumulator = shape.dtype.itemsize, accumulator_dtype(shape.dtype).itemsize
    rows = key_traffic(tiled, rank, distances)
    if tiles.moved is not None:
        heads, dims = shape.batch * shape.heads, (shape.dim, shape.value_dim)
        statistics = (1 + call.return_lse) * accumulator
        _, away = share(rank, call.layout, tiles.moved)
        _, back = share(rank, tiles.moved, call.layout)
        for peer in call.others(rank):
            for direction, step, messages, count, size in (
                ("forward", 0, 1, away[peer], dims[0] * element),
                ("forward", last, 2, back[peer], dims[1] * element + accumulator),
                ("backward", 0, 2, away[peer], (dims[0] + 2 * dims[1]) * element + statistics),
                ("backward", last, 1, back[peer], dims[0] * accumulator),
            ):
                rows.append(Traffic(direction, step, peer, messages, count * heads * size))
    size = shape.batch * shape.kv_heads * (shape.dim + shape.value_dim) * accumulator
    nodes = nodes_of(tiles, rank)
    for peer in call.others(rank):
        keys = _travelling(tiled, peer, rank)
        count = sum(int(np.diff(np.searchsorted(keys, node.keys))[0]) for node in nodes)
        rows.append(Traffic("backward", last, peer, 1, count * size))
    return rows


def _travelling(tiled: ResolvedCall, owner: int, computer: int) -> Ints:
    """Return the keys that `owner` sends to `computer`. If both are the same rank, return all its
    keys.
    """
    held = tiled.kv_layout.token_indices(owner)
    if owner == computer:
        return held
    return take_ranges(held, tiled.slices(computer, owner).sent_rows)


def _shares(nodes: list[Node], keys: Ints, index: Ints) -> list[KeyGradientShare]:
    """Return which of the given keys receive gradients from each node.

    A *node* is a group of tiles (ranges of queries) whose gradients one rank adds up. Nodes that
    contribute no gradients to `keys` are left out. The keys of a node are given by their indices in
    the array `index`. Both `keys` and `index` are ascending.
    """
    shares = []
    for i, node in enumerate(nodes):
        part = keys[slice(*np.searchsorted(keys, node.keys))]
        if part.size:
            places = _places(index, part)
            shares.append(KeyGradientShare(i, node.document, node.number, places))
    return shares


def _places(index: Ints, keys: Ints) -> Rows:
    return Rows(as_ranges(np.searchsorted(index, keys)))
