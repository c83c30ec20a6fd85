"""What a rank sends, receives and computes where tiles of queries are computed whole.

Legend: *pool*, the keys that a rank's tiles see and those that it holds, in the order of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import as_ranges, ranges
from seqpar.core.traffic import Traffic
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Slices
from seqpar.layout.remap import share
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.invariant_tiles import AnchoredTiles
from seqpar.softmax.keys.plan import Distances, KeyPlan, key_traffic
from seqpar.softmax.wire.row_messages import Rows


class Unit(NamedTuple):
    """A tile, as its rank computes it.

    Attributes:
        number: which tile of its document it is.
        rows: its queries, among those of the rank's tiles.
        keys: ranges of the pool that, one after another, are the keys that its slices are over.
        slices: of its queries over them.
        ready: how many blocks of keys, its own the first, must have arrived.
    """

    number: int
    rows: slice
    keys: list[slice]
    slices: Slices
    ready: int


class Node(NamedTuple):
    """Tiles whose gradients of keys their rank sums: a subtree of the sum over a document's tiles.

    Attributes:
        document: which it is.
        number: which tile of it is the subtree's first.
        tiles: the range of the pack's tiles that are in the subtree.
        keys: the range of the pack that has all keys that they see.
    """

    document: int
    number: int
    tiles: tuple[int, int]
    keys: tuple[int, int]


class KeyGradientShare(NamedTuple):
    """The gradients of a node that are of one rank's keys.

    Attributes:
        node: the node, by its place among its rank's.
        document, number: as of the node.
        places: where they are: where the node's rank sums them, in its pool; at the owner, in its
            local rows.
    """

    node: int
    document: int
    number: int
    places: Rows


@dataclass(frozen=True, eq=False)
class TilePlan:
    """One rank's part of a call.

    Attributes:
        moved: the layout of the queries in which each rank has those of its tiles; None if that is
            the call's.
        pool: how many keys the pool has.
        blank: whether the pool has keys that do not arrive, since no query sees them.
        arrivals: where in the pool each block of keys goes, this rank's own first.
        nodes: of the subtrees that it computes, the range of the pool with all keys that they
            see, and their units.
        sent: the gradients that it sends to each rank, itself among them.
        received: those of its own keys that each rank sends it.
    """

    moved: Geometry | None
    pool: int
    blank: bool
    arrivals: list[Rows]
    nodes: list[tuple[slice, list[Unit]]]
    sent: list[list[KeyGradientShare]]
    received: list[list[KeyGradientShare]]

    @classmethod
    def of(cls, call: ResolvedCall, distances: Distances) -> TilePlan:
        """Return the plan of the call's rank."""
        tiles, keys, rank = tiles_of(call), call.kv_layout, call.rank
        tiled = call.altered(layout=tiles.moved or call.layout)
        own = np.flatnonzero(tiles.owners == rank)
        held = keys.token_indices(rank)
        blocks = [held]
        for step in KeyPlan.of(tiled, distances).steps:
            found = [_travelling(tiled, peer, rank) for peer in step.source]
            blocks.append(np.concatenate(found) if found else held[:0])
        seen = [ranges(*tiles.key_ranges(tile).T) for tile in own.tolist()]
        arrived = np.concatenate(blocks)
        pool = np.unique(np.concatenate([arrived, *seen]))
        arrivals = [_places(pool, block) for block in blocks]
        step_of = np.zeros(pool.size, np.int64)
        for number, block in enumerate(blocks):
            step_of[np.searchsorted(pool, block)] = number
        units, row = dict[int, Unit](), 0
        for tile in own.tolist():
            rows = slice(row, row := row + int(np.diff(tiles.first_rows[tile : tile + 2])[0]))
            if not tiles.areas[tile]:
                continue
            of_unit = [slice(*part) for part in np.searchsorted(pool, tiles.key_ranges(tile))]
            ready = 1 + max(int(step_of[part].max()) for part in of_unit)
            slices = tiles.slices(tile, call.layout, keys, call.mask)
            units[tile] = Unit(int(tiles.numbers[tile]), rows, of_unit, slices, ready)
        nodes, own_nodes = [], nodes_of(tiles, rank)
        for node in own_nodes:
            of_node = [units[tile] for tile in range(*node.tiles) if tile in units]
            nodes.append((slice(*np.searchsorted(pool, node.keys)), of_node))
        peers = range(call.ranks)
        travel = lambda owner, host: _travelling(tiled, owner, host)  # noqa: E731
        sent = [_shares(own_nodes, travel(peer, rank), pool) for peer in peers]
        received = [_shares(nodes_of(tiles, peer), travel(rank, peer), held) for peer in peers]
        blank = pool.size > np.unique(arrived).size
        return cls(tiles.moved, pool.size, blank, arrivals, nodes, sent, received)


def tiles_of(call: ResolvedCall) -> AnchoredTiles:
    """Return the tiles of a call, made once."""
    return call.once(("tiles",), lambda: AnchoredTiles.of(call.layout, call.kv_layout, call.mask))


def nodes_of(tiles: AnchoredTiles, rank: int) -> list[Node]:
    """Return the largest subtrees of documents of which a rank computes all tiles with keys."""
    some = tiles.areas > 0
    own, others = (
        np.r_[0, np.cumsum(some & chosen)]
        for chosen in (tiles.owners == rank, tiles.owners != rank)
    )
    found = list[Node]()

    def cover(first: int, start: int, size: int, stop: int) -> None:
        """Find those of tiles `start` … `start + size − 1`, of a document from `first` to `stop`.

        Any of them are missing that are not in the document.
        """
        end = min(start + size, stop)
        if start >= end or own[end] == own[start]:
            return
        if others[end] > others[start]:
            cover(first, start, size // 2, stop)
            cover(first, start + size // 2, size // 2, stop)
            return
        keys = int(tiles.k_starts[start:end].min()), int(tiles.k_stops[start:end].max())
        found.append(Node(int(tiles.documents[first]), start - first, (start, end), keys))

    held = np.unique(tiles.documents[some & (tiles.owners == rank)])
    edges = np.searchsorted(tiles.documents, [held, held + 1]).T
    for first, stop in edges.tolist():
        cover(first, first, 1 << (stop - first - 1).bit_length(), stop)
    return found


def tile_areas(call: ResolvedCall, rank: int, distances: Distances) -> list[int]:
    """Return the area that a rank computes: with all keys, in one step."""
    tiles = tiles_of(call)
    return [int(tiles.areas[tiles.owners == rank].sum()) * call.shape.heads]


def tile_traffic(call: ResolvedCall, rank: int, distances: Distances) -> list[Traffic]:
    """Return what a rank sends: rows of tiles that are cut, keys, and gradients of these.

    Rows move in step 0, and back, like gradients of keys, in the step behind the last of keys.
    """
    tiles, shape, last = tiles_of(call), call.shape, len(distances) + 1
    tiled = call.altered(layout=tiles.moved or call.layout, rank=rank)
    element, accumulator = shape.dtype.itemsize, accumulator_dtype(shape.dtype).itemsize
    rows = key_traffic(tiled, rank, distances, returning=False)
    if tiles.moved is not None:
        heads, dims = shape.batch * shape.heads, (shape.dim, shape.value_dim)
        statistics = (1 + call.return_lse) * accumulator
        away = share(rank, call.layout, tiles.moved).counts
        back = share(rank, tiles.moved, call.layout).counts
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


def _travelling(tiled: ResolvedCall, owner: int, host: int) -> Ints:
    """Return which keys of the pack a rank has that another one's tiles may see; own ones: all."""
    held = tiled.kv_layout.token_indices(owner)
    return held if owner == host else held[ranges(*tiled.slices(host, owner).sent_rows.T)]


def _shares(nodes: list[Node], keys: Ints, index: Ints) -> list[KeyGradientShare]:
    """Return the gradients of these keys of the pack, by a rank's nodes, none empty.

    Their places are among the keys of `index`, which ascend as these do.
    """
    found = []
    for i, node in enumerate(nodes):
        part = keys[slice(*np.searchsorted(keys, node.keys))]
        if part.size:
            places = _places(index, part)
            found.append(KeyGradientShare(i, node.document, node.number, places))
    return found


def _places(index: Ints, keys: Ints) -> Rows:
    """Return where keys are in an ascending index of keys."""
    return Rows(as_ranges(np.searchsorted(index, keys)))
