"""A rank's messages and work if one rank computes each whole tile of queries.

Legend: *pool*, the keys that a rank's tiles attend to and the keys that it holds, in pack order.
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
    """The work of one tile.

    Attributes:
        number: the tile's number in its document.
        rows: its queries, among the queries of the rank's tiles.
        keys: ranges of the pool; joined, they are the block of keys that the slices refer to.
        slices: slices of its queries over this block.
        ready: how many blocks of keys must have arrived; the rank's own block counts as the first.
    """

    number: int
    rows: slice
    keys: list[slice]
    slices: Slices
    ready: int


class Node(NamedTuple):
    """A subtree of the sum over a document's tiles, which one rank computes completely.

    Attributes:
        document: the document.
        number: the number of the subtree's first tile in the document.
        tiles: the range of the pack's tiles that are in the subtree.
        keys: a range of the pack with all keys that these tiles attend to.
    """

    document: int
    number: int
    tiles: tuple[int, int]
    keys: tuple[int, int]


class KeyGradientShare(NamedTuple):
    """The part of a node's gradients that belongs to one rank's keys.

    Attributes:
        node: the node's index among the nodes of its rank.
        document, number: the node's document and number.
        places: the rows of the gradients: in the pool on the rank that computes the node, and among
            the local rows on the rank that owns the keys.
    """

    node: int
    document: int
    number: int
    places: Rows


@dataclass(frozen=True, eq=False)
class TilePlan:
    """One rank's part of a call.

    Attributes:
        moved: a layout of the queries in which each rank holds the rows of its tiles, or None if
            the call's layout is one.
        pool: how many keys the pool has.
        blank: whether some keys of the pool never arrive, because no query attends to them.
        arrivals: the rows of the pool for each block of keys, this rank's own block first.
        nodes: for each subtree that this rank computes, a range of the pool with all keys that it
            attends to, and its units.
        sent: the shares of gradients for each rank, including this one.
        received: the shares of this rank's key gradients from each rank, including this one.
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
            units_of_node = [units[tile] for tile in range(*node.tiles) if tile in units]
            nodes.append((slice(*np.searchsorted(pool, node.keys)), units_of_node))
        sent, received = [], []
        for peer in range(call.ranks):
            sent.append(_shares(own_nodes, _travelling(tiled, peer, rank), pool))
            travelled = _travelling(tiled, rank, peer)
            received.append(_shares(nodes_of(tiles, peer), travelled, held))
        blank = pool.size > np.unique(arrived).size
        return cls(tiles.moved, pool.size, blank, arrivals, nodes, sent, received)


def tiles_of(call: ResolvedCall) -> AnchoredTiles:
    return call.once(("tiles",), lambda: AnchoredTiles.of(call.layout, call.kv_layout, call.mask))


def nodes_of(tiles: AnchoredTiles, rank: int) -> list[Node]:
    """Return the largest subtrees whose tiles with keys are all computed by this rank."""
    with_keys = tiles.areas > 0
    own = np.r_[0, np.cumsum(with_keys & (tiles.owners == rank))]
    others = np.r_[0, np.cumsum(with_keys & (tiles.owners != rank))]
    nodes = list[Node]()

    def cover(first: int, start: int, size: int, stop: int) -> None:
        """Add nodes for tiles `start` … `start + size − 1` of a document.

        The document has tiles `first` … `stop − 1`; tiles outside it are ignored.
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
    """Return the area that a rank computes, in a single step with all keys."""
    tiles = tiles_of(call)
    return [int(tiles.areas[tiles.owners == rank].sum()) * call.shape.heads]


def tile_traffic(call: ResolvedCall, rank: int, distances: Distances) -> list[Traffic]:
    """Return a rank's messages: rows of divided tiles, keys, and gradients of keys.

    Rows of divided tiles move in step 0. They return, like the gradients of keys, in the step after
    the last step of keys.
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


def _travelling(tiled: ResolvedCall, owner: int, computer: int) -> Ints:
    """Return the keys of `owner` that travel to `computer`, or all of its keys if they are one."""
    held = tiled.kv_layout.token_indices(owner)
    if owner == computer:
        return held
    return held[ranges(*tiled.slices(computer, owner).sent_rows.T)]


def _shares(nodes: list[Node], keys: Ints, index: Ints) -> list[KeyGradientShare]:
    """Return the nodes' shares of the gradients of these keys, leaving out empty ones.

    `keys` and `index` ascend in the pack; the places of a share are places in `index`.
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
