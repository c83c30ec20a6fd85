"""Cut tasks by what their queries see: into parts of one band each, and those into stages.

Documents of queries and of keys have their ends aligned (`Mask`), so bands are counted in each
one's own positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.arguments import Ints
from seqpar.layout.geometry import Geometry
from seqpar.layout.mask import UNLIMITED, Mask
from seqpar.layout.ranges import count_up
from seqpar.layout.tasks import Tasks


class Parts(NamedTuple):
    """Rectangles of positions under a band each, as (n,) arrays.

    Those of tasks are trimmed: each query of a part sees some of its keys, and each key is seen by
    some of its queries.

    Attributes:
        documents: whose queries and keys.
        q_starts, q_stops: which queries.
        k_starts, k_stops: which keys.
        lows, highs: the band lo ≤ k_pos − q_pos ≤ hi.
        servers: the rank that computes the part.
    """

    documents: Ints
    q_starts: Ints
    q_stops: Ints
    k_starts: Ints
    k_stops: Ints
    lows: Ints
    highs: Ints
    servers: Ints

    @classmethod
    def of(cls, tasks: Tasks, queries: Geometry, keys: Geometry, mask: Mask) -> Parts:
        """Return the parts of tasks: what a prefix shows, and what the mask's band does."""
        shifts = (keys.lengths - queries.lengths)[tasks.documents]
        q, k = (tasks.q_starts, tasks.q_stops), (tasks.k_starts, tasks.k_stops)
        bands = shifts - mask.left, shifts + mask.right
        if mask.prefix is None:
            return cls(tasks.documents, *q, *k, *bands, tasks.servers).trimmed()
        prefix = np.array(mask.prefix, dtype=np.int64)[tasks.documents]
        everything = np.full_like(shifts, UNLIMITED)
        behind, before = np.maximum(k[0], prefix), np.minimum(k[1], prefix)
        parts = (
            cls(tasks.documents, *q, behind, k[1], *bands, tasks.servers),
            cls(tasks.documents, *q, k[0], before, -everything, everything, tasks.servers),
        )
        return cls(*map(np.concatenate, zip(*parts, strict=True))).trimmed()

    def trimmed(self) -> Parts:
        """Return the parts without the queries that see no key and the keys that nobody sees."""
        kept = self.take(self.k_stops > self.k_starts)
        q_starts = np.maximum(kept.q_starts, kept.k_starts - kept.highs)
        q_stops = np.minimum(kept.q_stops, kept.k_stops - kept.lows)
        kept = kept._replace(q_starts=q_starts, q_stops=q_stops).take(q_stops > q_starts)
        k_starts = np.maximum(kept.k_starts, kept.q_starts + kept.lows)
        k_stops = np.minimum(kept.k_stops, kept.q_stops + kept.highs)
        return kept._replace(k_starts=k_starts, k_stops=k_stops)

    def take(self, chosen: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Parts:
        """Return those parts that an index, or a mask, chooses."""
        return Parts(*(column[chosen] for column in self))

    def areas(self) -> Ints:
        """Return how many pairs of each part see each other; it need not be trimmed."""
        return self._below(self.highs) - self._below(self.lows - 1)

    def _below(self, bounds: Ints) -> Ints:
        """Count each part's pairs with k_pos − q_pos ≤ bound.

        Query i sees clip(i + c, 0, w) of a part's w keys; these sums are in closed form.
        """
        width = self.k_stops - self.k_starts
        c = np.clip(bounds + 1 - self.k_starts, -self.q_stops, width - self.q_starts)

        def before(x: Ints) -> Ints:
            growing = np.clip(x, 0, width)
            return growing * (growing - 1) // 2 + width * np.maximum(x - width, 0)

        return before(self.q_stops + c) - before(self.q_starts + c)

    def cut(self, starts: Ints, edges: Ints) -> tuple[Parts, Ints]:
        """Return the parts cut at each server's edges, and between which edges each piece lies.

        `edges` is (servers, n + 1), of positions that count from the start of the packed batch,
        where document d begins at `starts[d]`. All queries lie between the first and the last.
        """
        own_edges = edges[self.servers] - starts[self.documents][:, None]
        index, q_starts, q_stops, between = cut_ranges(self.q_starts, self.q_stops, own_edges)
        pieces = self.take(index)._replace(q_starts=q_starts, q_stops=q_stops)
        return pieces.trimmed(), between


def cut_ranges(starts: Ints, stops: Ints, edges: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return ranges cut at ascending edges, (ranges, n + 1), all between the first and the last.

    Of each piece: of which range it is, where it starts and stops, and between which edges it lies.
    """
    first = (edges[:, 1:-1] <= starts[:, None]).sum(1)
    counts = (edges[:, 1:-1] < stops[:, None]).sum(1) - first + 1
    index = np.repeat(np.arange(counts.size), counts)
    between = first[index] + count_up(counts)
    starts = np.maximum(starts[index], edges[index, between])
    stops = np.minimum(stops[index], edges[index, between + 1])
    kept = stops > starts  # edges may be equal
    return index[kept], starts[kept], stops[kept], between[kept]
