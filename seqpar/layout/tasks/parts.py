"""Cut tasks into parts with one band each, and parts into stages.

The ends of a document's queries and keys are aligned (`Mask`). Bands include that shift, so they
apply to positions that count from the start of the document's queries and of its keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up, overlapping
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.band_intersection import trim
from seqpar.layout.masks.mask import Mask
from seqpar.layout.masks.mask_ranges import Ranges
from seqpar.layout.tasks.tasks import TaskRectangles


class Parts(NamedTuple):
    """Rectangles of positions, each under a band, as (n,) arrays, trimmed to visible pairs."""

    documents: Ints  # the document of the queries and keys
    q_starts: Ints  # the range of queries
    q_stops: Ints
    k_starts: Ints  # the range of keys
    k_stops: Ints
    lows: Ints  # the band lo ≤ k_pos − q_pos ≤ hi
    highs: Ints
    servers: Ints  # the rank that computes the part

    @classmethod
    def of(cls, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask) -> Parts:
        """Return the parts of tasks: pairs in a prefix, and other pairs in the mask's band."""
        if mask.ranges is not None:
            return cls._of_ranges(tasks, mask.ranges.columns)
        shifts = (keys.lengths - queries.lengths)[tasks.documents]
        q, k = (tasks.q_starts, tasks.q_stops), (tasks.k_starts, tasks.k_stops)
        lows, highs = tasks.bands
        bands = np.maximum(lows, shifts - mask.left), np.minimum(highs, shifts + mask.right)
        if mask.prefix is None:
            return cls(tasks.documents, *q, *k, *bands, tasks.servers).trimmed()
        prefix = np.array(mask.prefix, dtype=np.int64)[tasks.documents]
        behind, before = np.maximum(k[0], prefix), np.minimum(k[1], prefix)
        parts = (
            cls(tasks.documents, *q, behind, k[1], *bands, tasks.servers),
            cls(tasks.documents, *q, k[0], before, lows, highs, tasks.servers),
        )
        return cls(*map(np.concatenate, zip(*parts, strict=True))).trimmed()

    @classmethod
    def _of_ranges(cls, tasks: TaskRectangles, ranges: Ranges) -> Parts:
        of_task, of_range = overlapping(tasks[:3], ranges[:3])
        tasks, ranges = tasks.take(of_task), ranges.take(of_range)
        lows, highs = tasks.bands
        return cls(
            tasks.documents,
            np.maximum(tasks.q_starts, ranges.q_starts),
            np.minimum(tasks.q_stops, ranges.q_stops),
            np.maximum(tasks.k_starts, ranges.k_starts),
            np.minimum(tasks.k_stops, ranges.k_stops),
            np.maximum(lows, ranges.lows),
            np.minimum(highs, ranges.highs),
            tasks.servers,
        ).trimmed()

    def trimmed(self) -> Parts:
        """Return the parts without queries and keys that have no visible pair."""
        kept, edges = trim(*self[1:7])
        return Parts(self.documents[kept], *edges, *(x[kept] for x in self[5:]))

    def take(self, chosen: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Parts:
        return Parts(*(column[chosen] for column in self))

    def areas(self) -> Ints:
        return self._below(self.highs) - self._below(self.lows - 1)

    def _below(self, bounds: Ints) -> Ints:
        """Count pairs with k_pos − q_pos ≤ bound: query i has clip(i + c, 0, w) of w keys."""
        width = self.k_stops - self.k_starts
        c = np.clip(bounds + 1 - self.k_starts, -self.q_stops, width - self.q_starts)

        def before(x: Ints) -> Ints:
            growing = np.clip(x, 0, width)
            return growing * (growing - 1) // 2 + width * np.maximum(x - width, 0)

        return before(self.q_stops + c) - before(self.q_starts + c)

    def cut(self, starts: Ints, edges: Ints) -> tuple[Parts, Ints]:
        """Return the parts cut at each server's edges, and the index of each piece's interval.

        `edges` (servers, n + 1) count in the pack, where document d begins at `starts[d]`.
        """
        own_edges = edges[self.servers] - starts[self.documents][:, None]
        index, q_starts, q_stops, between = cut_ranges(self.q_starts, self.q_stops, own_edges)
        pieces = self.take(index)._replace(q_starts=q_starts, q_stops=q_stops)
        return pieces.trimmed(), between


def cut_ranges(starts: Ints, stops: Ints, edges: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut ranges at edges (ranges, n + 1); return each piece's range, start, stop, interval."""
    first = (edges[:, 1:-1] <= starts[:, None]).sum(1)
    counts = (edges[:, 1:-1] < stops[:, None]).sum(1) - first + 1
    index = np.repeat(np.arange(counts.size), counts)
    between = first[index] + count_up(counts)
    starts = np.maximum(starts[index], edges[index, between])
    stops = np.minimum(stops[index], edges[index, between + 1])
    kept = stops > starts  # edges may be equal
    return index[kept], starts[kept], stops[kept], between[kept]
