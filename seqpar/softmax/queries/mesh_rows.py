"""Which rows travel where ranks lie on a mesh and each computes a tile of queries and keys.

The tile of a rank is the queries of all ranks of its row over the keys of all ranks of its column.
So each pair of ranks, the queries of one and the keys of the other, is in one tile: that of the
rank where the first one's row crosses the second one's column.
"""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import union
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask, Slices, local_slices


class Tiles:
    """The tiles of a call's ranks, on a mesh of so many columns whose ranks count along its rows.

    It keeps what it has made, which is much: make one, ask it, and forget it.
    """

    def __init__(self, queries: Geometry, keys: Geometry, mask: Mask, columns: int) -> None:
        self._geometry, self._columns = (queries, keys, mask), columns
        self._local: dict[tuple[int, int], Slices] = {}
        self._rows: dict[tuple[str, int, int], Ints] = {}

    def row(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's row, in the order in which it sends them queries."""
        first = rank - rank % self._columns
        return [first + (rank + step) % self._columns for step in range(1, self._columns)]

    def column(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's column, in the order in which it sends them keys."""
        ranks = self._geometry[0].ranks
        return [other % ranks for other in range(rank + self._columns, rank + ranks, self._columns)]

    def seeing(self, rank: int, host: int) -> Ints:
        """Return (m, 2) ranges of a rank's rows: those that see a key of the host's column.

        The host is another rank of its row.
        """
        if (found := self._rows.get(("seeing", rank, host))) is None:
            parts = [self._slices(rank, peer).seeing for peer in [host, *self.column(host)]]
            found = self._rows["seeing", rank, host] = _union(parts)
        return found

    def seen(self, rank: int, host: int) -> Ints:
        """Return (m, 2) ranges of a rank's key rows: those that queries of the host's row see.

        The host is another rank of its column.
        """
        if (found := self._rows.get(("seen", rank, host))) is None:
            parts = [self._slices(peer, rank).k_rows for peer in [host, *self.row(host)]]
            found = self._rows["seen", rank, host] = _union(parts)
        return found

    def slices(self, guest: int, source: int, host: int) -> Slices:
        """Return the slices of a guest's rows over a source's keys, as blocks that are at the host.

        The guest is in the host's row and the source in its column. What is the host's own is whole
        there.
        """
        slices = self._slices(guest, source)
        if guest != host:
            slices = slices.of_queries(self.seeing(guest, host))
        return slices if source == host else slices.of_keys(self.seen(source, host))

    def area(self, guest: int, source: int) -> int:
        """Return how many pairs see each other of one rank's queries and another's keys."""
        return self._slices(guest, source).area

    def _slices(self, q_rank: int, k_rank: int) -> Slices:
        if (found := self._local.get((q_rank, k_rank))) is None:
            queries, keys, mask = self._geometry
            found = local_slices(queries, q_rank, keys, k_rank, mask)
            self._local[q_rank, k_rank] = found
        return found


def _union(parts: list[Ints]) -> Ints:
    """Return the union of ranges in any order, as (m, 2)."""
    starts, stops = np.concatenate(parts).T
    order = np.argsort(starts, kind="stable")
    return union(starts[order], stops[order])
