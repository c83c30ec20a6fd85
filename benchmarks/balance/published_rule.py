"""DistCA's rule for moving attention, as published, to compare `seqpar.balance.disaggregate` with.

Every rank below the mean takes items from ranks above it. The rank with the largest deficit takes
first. An item is a document's rows on a rank. A part of an item has equal numbers of rows from its
front and its back, so its work is proportional to its rows. The rule takes the item with the most
moved work per byte; a part counts all keys of its document, even if the rank already has some. A
rank is done when its deficit is below a fraction of the mean. Only deficits are bounded, so a rank
may keep a surplus; the variant driven by the largest surplus bounds the surplus.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.balance import RowBytes
from seqpar.balance.disaggregation.cells import cells_of
from seqpar.costs.grid import Floats
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.layout.tasks.tasks import TaskRectangles

TILE = 128


class Plan(NamedTuple):
    """The tasks, and the bytes of all ranks as the rule counts them."""

    tasks: TaskRectangles
    charged: float


class Items:
    """Pairs of rows, one from the front and one from the back, of a document's rows on a rank."""

    def __init__(self, layout: Layout) -> None:
        cells = cells_of(layout.geometry, layout.geometry, Mask(UNLIMITED, 0))
        self.documents, self.servers = cells.documents, cells.servers
        self.starts, self.stops, self.work = cells.q_starts, cells.q_stops, cells.areas() * 1.0
        rows = self.stops - self.starts
        self.outer, self.inner = np.zeros_like(rows), -(-rows // 2)  # pairs from … to

    def rows(self) -> Floats:
        """(n,) the query rows of each item."""
        return np.minimum(2.0 * (self.inner - self.outer), self.stops - self.starts)

    def split(self, item: int, share: float) -> int:
        """Split off a share of an item's rows, in whole tiles. Returns the new item's index."""
        pairs = int(self.inner[item] - self.outer[item])
        taken = min(max(round(share * pairs * 2 / TILE), 1) * TILE // 2, pairs)
        work = self.work[item] * taken / pairs
        for name in ("documents", "servers", "starts", "stops", "outer", "inner", "work"):
            column = getattr(self, name)
            setattr(self, name, np.append(column, column[item]))
        self.inner[-1] = self.outer[item] = self.outer[item] + taken
        self.work[-1] = work
        self.work[item] -= work
        return self.work.size - 1

    def tasks(self) -> TaskRectangles:
        """Return the heads and tails of all items as tasks."""
        middle = (self.starts + self.stops + 1) // 2
        heads = self.starts + self.outer, np.minimum(self.starts + self.inner, middle)
        tails = np.maximum(self.stops - self.inner, middle), self.stops - self.outer
        starts, stops = (np.concatenate(pair) for pair in zip(heads, tails, strict=True))
        kept = np.flatnonzero(stops > starts)
        documents, servers = np.tile(self.documents, 2)[kept], np.tile(self.servers, 2)[kept]
        starts, stops = starts[kept], stops[kept]
        return TaskRectangles(documents, starts, stops, np.zeros_like(starts), stops, servers)


def published(
    layout: Layout, row_bytes: RowBytes, tolerance: float = 0.1, by_surplus: bool = False
) -> Plan:
    """Plan a causal batch by the rule, or by the variant driven by the largest surplus."""
    items, charged = Items(layout), 0.0
    load = np.bincount(items.servers, items.work, layout.ranks)
    mean = float(load.mean())

    def move(givers: NDArray[np.bool_], taker: int) -> bool:
        """Move the best item, or the best part of one, of some ranks to another rank."""
        nonlocal charged
        candidates = np.flatnonzero(givers[items.servers] & (items.work > 0))
        if not candidates.size:
            return False
        work = items.work[candidates]
        moved = np.minimum(work, (load - mean)[items.servers[candidates]])
        moved = np.minimum(moved, mean - load[taker])
        share, keys = moved / work, items.stops[candidates]
        nbytes = share * items.rows()[candidates] * row_bytes.query + keys * row_bytes.key
        best = int(np.argmax(moved / nbytes))
        item = int(candidates[best])
        if share[best] < 1:
            item = items.split(item, float(share[best]))
        giver = items.servers[item]
        load[giver] -= items.work[item]
        load[taker] += items.work[item]
        charged += items.rows()[item] * row_bytes.query + items.stops[item] * row_bytes.key
        items.servers[item] = taker
        return True

    if by_surplus:
        while load.max() > (1 + tolerance) * mean:
            most, taker = load.max(), int(load.argmin())
            if not move(np.arange(load.size) == load.argmax(), taker) or load[taker] >= most:
                break  # no part is small enough
    else:
        for taker in np.argsort(load, kind="stable").tolist():
            while mean - load[taker] > tolerance * mean and move(load > mean, taker):
                pass
    return Plan(items.tasks(), charged)
