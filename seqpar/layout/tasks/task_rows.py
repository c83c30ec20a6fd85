"""Decide which rows travel for tasks, from whom to whom, and in which stage.

The queries that a server needs are put in order and cut into stages, so that results of one stage
return while the next one is computed. A key comes to a server once, with the first guests that see
it or before; its gradient can return when the last guests have been computed. What the server's own
queries do with keys of others is spread over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import split_at
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.parts import Parts
from seqpar.layout.tasks.segments import Segments
from seqpar.layout.tasks.tasks import TaskRectangles, digest_of

_MAX_STAGES = 4


class Stages(NamedTuple):
    """Of rows that travel: in which stages their server needs them.

    Attributes:
        own: in which its own queries do; −1 if none does.
        first, last: in which anything does.
    """

    own: int
    first: int
    last: int


class ServerRows(NamedTuple):
    """Rows of some ranks, one after another, as a server has them.

    Attributes:
        holding: the rows' positions. Where it says documents, it has numbers of runs.
        documents: (runs,) of each run.
        ranks: (m,) whose rows they are.
        counts: (m,) how many of each.
    """

    holding: Holding
    documents: Ints
    ranks: list[int]
    counts: list[int]

    @classmethod
    def local(cls, geometry: Geometry, rank: int) -> ServerRows:
        """Return all that a rank holds."""
        holding = geometry.holdings[rank]
        return cls(holding, np.arange(geometry.lengths.size), [rank], [holding.tokens])

    @classmethod
    def of(cls, table: Ints) -> ServerRows:
        """Return rows from a table (4, spans) of ranks, documents, starts and stops, in order."""
        ranks, documents, starts, stops = table
        begins = np.ones(ranks.size, bool)
        begins[1:] = (ranks[1:] != ranks[:-1]) | (documents[1:] != documents[:-1])
        holding = Holding((np.cumsum(begins) - 1, starts, stops))
        found, first = np.unique(ranks, return_index=True)
        counts = np.add.reduceat(stops - starts, first) if first.size else first
        return cls(holding, documents[begins], found.tolist(), counts.tolist())

    @classmethod
    def joined(cls, blocks: Sequence[ServerRows]) -> ServerRows:
        """Return the rows of several blocks, one after another."""
        if not blocks:
            return cls.of(np.empty((4, 0), np.int64))
        first_run = np.cumsum([0] + [block.documents.size for block in blocks])
        runs = [x.holding.documents + i for x, i in zip(blocks, first_run, strict=False)]
        starts, stops = [x.holding.starts for x in blocks], [x.holding.stops for x in blocks]
        return cls(
            Holding((np.concatenate(runs), np.concatenate(starts), np.concatenate(stops))),
            np.concatenate([x.documents for x in blocks]),
            [rank for x in blocks for rank in x.ranks],
            [count for x in blocks for count in x.counts],
        )


class TaskRows:
    """What of a batch travels for its tasks.

    Attributes:
        digest: that of the tasks.
        stages: how many there are; the same on all ranks.
        parts: of all tasks, cut into stages.
        queries, keys: what servers need, their own rows included.
    """

    def __init__(
        self,
        tasks: TaskRectangles,
        queries: Geometry,
        keys: Geometry,
        mask: Mask,
        rows_of_stage: int,
    ) -> None:
        """Cut the work into stages, in each of which about so many rows come to a server.

        There are at most `_MAX_STAGES`.
        """
        self.digest, parts = digest_of(tasks), Parts.of(tasks, queries, keys, mask)
        one = np.zeros_like(parts.servers), 1
        of_queries = Segments.of_queries(parts, queries, *one)
        of_keys = Segments.of_keys(parts, keys, *one)
        coming, keys_coming = of_queries.coming(queries), of_keys.coming(keys)
        most = max(_most(of_queries, coming), _most(of_keys, keys_coming))
        count = self.stages = min(_MAX_STAGES, max(1, -(-most // rows_of_stage)))
        edges = of_queries.stage_edges(coming, count, queries)
        self.parts, stages = parts.cut(queries.cu_seqlens[:-1], edges)
        self.queries = Segments.of_queries(self.parts, queries, stages, count)
        held = _held(self.parts, queries)
        guest = np.flatnonzero(self.parts.q_stops - self.parts.q_starts > held)
        own = np.flatnonzero(held)
        needing = self.parts.take(np.r_[guest, own])
        self.keys = Segments.of_keys(needing, keys, np.r_[stages[guest], own * 0 - 1], count)

    def of_server(self, rank: int) -> Parts:
        """Return the parts that a rank computes."""
        return self.parts.take(self.parts.servers == rank)


def sent_by(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Segments:
    """Return which of its rows a rank sends, to which servers: segments of local rows."""
    start, stop = needed.rows(geometry, rank)
    chosen = (stop > start) & (needed.servers != rank)
    return needed._replace(starts=start, stops=stop).take(chosen).staged(stages)


def arriving_at(
    rank: int, geometry: Geometry, needed: Segments, stages: int
) -> dict[Stages, ServerRows]:
    """Return the rows of others that come to a rank, which is a server, by their stages."""
    needed, tables = needed.of(rank), [np.empty((7, 0), np.int64)]
    for home in range(geometry.ranks) if needed.starts.size else ():
        if home == rank:
            continue
        start, stop = needed.rows(geometry, home)
        rows = needed._replace(starts=start, stops=stop).take(stop > start).staged(stages)
        if not rows.starts.size:
            continue
        holding = geometry.holdings[home]
        span, first, last = split_at(holding.offsets, rows.starts, rows.stops)
        segment = np.searchsorted(rows.stops, holding.offsets[span] + first, side="right")
        labels, positions = np.stack(rows[3:])[:, segment], holding.starts[span]
        columns = np.full_like(span, home), holding.documents[span]
        tables.append(np.stack([*labels, *columns, positions + first, positions + last]))
    table = np.concatenate(tables, axis=1)
    kinds, kind = np.unique(table[:3], axis=1, return_inverse=True)
    return {
        Stages(*stages): ServerRows.of(table[3:, kind.ravel() == i])
        for i, stages in enumerate(kinds.T.tolist())
    }


def _most(needed: Segments, coming: Ints) -> int:
    """Return how many rows come to the server to which most do."""
    return int(np.bincount(needed.servers, coming, 1).max())


def _held(parts: Parts, queries: Geometry) -> Ints:
    """Return how many queries of each part its server holds."""
    found = np.zeros_like(parts.servers)
    order = np.argsort(parts.servers, kind="stable")
    edges = np.searchsorted(parts.servers[order], np.arange(queries.ranks + 1))
    for server in np.flatnonzero(np.diff(edges)).tolist():
        own, holding = order[edges[server] : edges[server + 1]], queries.holdings[server]
        some = parts.take(own)
        found[own] = holding.rows_before(some.documents, some.q_stops)
        found[own] -= holding.rows_before(some.documents, some.q_starts)
    return found
