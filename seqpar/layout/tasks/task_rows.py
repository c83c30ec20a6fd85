"""Decide which rows travel for tasks, between which ranks, and in which stage.

The queries that a server needs are cut into stages, so that the results of one stage return while
the next is computed. A key travels to a server once, no later than the first queries of other ranks
that attend to it; its gradient can return after the last. The work of the server's own queries with
keys of other ranks is spread over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up, split_at
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.masks.band_intersection import cut_at_gaps, in_reach
from seqpar.layout.masks.mask import Mask, Slices
from seqpar.layout.tasks.parts import Parts
from seqpar.layout.tasks.segments import Segments
from seqpar.layout.tasks.tasks import TaskRectangles, digest_of

_MAX_STAGES = 4


class Stages(NamedTuple):
    """The stages in which a server needs rows that travel to it."""

    own: int  # the stage in which its own queries need them; −1 if they do not
    first: int  # the first stage in which any queries need them
    last: int  # the last such stage


class ServerRows(NamedTuple):
    """Rows of some ranks, one after another, as a server has them."""

    holding: Holding  # the rows' positions. Its documents are numbers of runs.
    documents: Ints  # (runs,) the document of each run
    ranks: list[int]  # (m,) the ranks that own the rows
    counts: list[int]  # (m,) the number of rows of each rank

    @classmethod
    def local(cls, geometry: Geometry, rank: int) -> ServerRows:
        holding = geometry.holdings[rank]
        return cls(holding, np.arange(geometry.lengths.size), [rank], [holding.tokens])

    @classmethod
    def of(cls, table: Ints) -> ServerRows:
        """Return rows from a (4, spans) table of ranks, documents, starts and stops, in order."""
        ranks, documents, starts, stops = table
        begins = np.ones(ranks.size, bool)
        begins[1:] = (ranks[1:] != ranks[:-1]) | (documents[1:] != documents[:-1])
        holding = Holding((np.cumsum(begins) - 1, starts, stops))
        found, first = np.unique(ranks, return_index=True)
        counts = np.add.reduceat(stops - starts, first) if first.size else first
        return cls(holding, documents[begins], found.tolist(), counts.tolist())

    @classmethod
    def joined(cls, blocks: Sequence[ServerRows]) -> ServerRows:
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
    """The rows of a batch that travel for its tasks."""

    def __init__(
        self, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask, stage_rows: int
    ) -> None:
        """Cut the work into stages in which about `stage_rows` rows come to a server."""
        self.digest, parts = digest_of(tasks), Parts.of(tasks, queries, keys, mask)
        one = np.zeros_like(parts.servers), 1
        of_queries = Segments.of_queries(parts, queries, *one)
        of_keys = Segments.of_keys(parts, keys, *one)
        coming, keys_coming = of_queries.coming(queries), of_keys.coming(keys)
        most = max(_most(of_queries, coming), _most(of_keys, keys_coming))
        count = self.stages = min(_MAX_STAGES, max(1, -(-most // stage_rows)))
        edges = of_queries.stage_edges(coming, count, queries)
        self.parts, stages = parts.cut(queries.cu_seqlens[:-1], edges)
        # The rows that servers need, including rows that they own.
        self.queries = Segments.of_queries(self.parts, queries, stages, count)
        held = _held(self.parts, queries)
        guest = np.flatnonzero(self.parts.q_stops - self.parts.q_starts > held)
        own = np.flatnonzero(held)
        needing = self.parts.take(np.r_[guest, own])
        self.keys = Segments.of_keys(needing, keys, np.r_[stages[guest], own * 0 - 1], count)

    def of_server(self, rank: int) -> Parts:
        return self.parts.take(self.parts.servers == rank)


def sent_by(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Segments:
    """Return the rows that a rank sends, as segments of its local rows with their servers."""
    start, stop = needed.rows(geometry, rank)
    chosen = (stop > start) & (needed.servers != rank)
    return needed._replace(starts=start, stops=stop).take(chosen).staged(stages)


def arriving_at(
    rank: int, geometry: Geometry, needed: Segments, stages: int
) -> dict[Stages, ServerRows]:
    """Return the rows of other ranks that come to a server, the rank `rank`, by their stages."""
    needed, tables = needed.of(rank), [np.empty((7, 0), np.int64)]
    for home in range(geometry.ranks) if needed.starts.size else ():
        if home == rank:
            continue
        start, stop = needed.rows(geometry, home)
        chosen = stop > start
        if not chosen.any():
            continue
        rows = needed._replace(starts=start, stops=stop).take(chosen).staged(stages)
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


def task_slices(parts: Parts, queries: ServerRows, keys: ServerRows, shift: Ints) -> Slices:
    """Return the slices of the blocks' rows with visible pairs in these parts.

    There is one for each part, cluster of query rows and run of key rows with any visible pair.
    `shift` (documents,) aligns the ends of each document.
    """
    q, k = queries.holding, keys.holding
    part, q_runs = _runs_of(parts.documents, queries)
    q_start = q.rows_before(q_runs, parts.q_starts[part])
    q_stop = q.rows_before(q_runs, parts.q_stops[part])
    piece, q_start, q_stop = cut_at_gaps(q, q_start, q_stop, (parts.highs - parts.lows)[part])
    part, q_runs = part[piece], q_runs[piece]
    piece, k_runs = _runs_of(parts.documents[part], keys)
    part, q_runs, q_start, q_stop = (x[piece] for x in (part, q_runs, q_start, q_stop))
    bands = parts.lows[part], parts.highs[part]
    limits = parts.k_starts[part], parts.k_stops[part]
    table = in_reach(q, k, (q_runs, k_runs), (q_start, q_stop), bands, limits)
    table = table[:, np.argsort(table[2], kind="stable")]
    q_rows, k_rows, found = (np.stack([table[i], table[i + 1]], 1) for i in (0, 2, 4))
    none, aligned = np.empty((0, 2), np.int64), q.aligned(shift[queries.documents])
    return Slices(q_rows, k_rows, found, q.positions, k.positions, none, q_aligned=aligned)


def _runs_of(documents: Ints, block: ServerRows) -> tuple[Ints, Ints]:
    """Return all pairs of a document's index and a run of that document in the block."""
    runs = block.holding.runs.documents
    order = np.argsort(block.documents[runs], kind="stable")
    found = block.documents[runs][order]
    first = np.searchsorted(found, documents, side="left")
    counts = np.searchsorted(found, documents, side="right") - first
    index = np.repeat(np.arange(documents.size), counts)
    return index, runs[order[first[index] + count_up(counts)]]
