"""Find the rows that ranks send to each other for tasks, and the stage in which a row is sent.

A *task* is a rectangle of query positions and key positions (`tasks.py`). The *server* of a task is
the rank that computes it. The *owner* of a row is the rank that holds it. A row that a server
receives from a different rank is *foreign*.

A server receives its foreign queries in several stages. While the server computes one stage, it
returns the results of the preceding stage. A key is sent to a server only once, no later than the
first foreign query that attends to it. The gradient of the key can be returned after the server has
computed the last foreign query that attends to the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints, RowIndex
from seqpar.core.ranges import enumerated
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.masks.mask import Mask, Slices
from seqpar.layout.masks.slices_of_band import cut_at_gaps, in_reach
from seqpar.layout.tasks.tasks import Parts, TaskRectangles, cut_ranges, described

_MAX_STAGES = 4


class Segments(NamedTuple):
    """Ranges of a packed batch that servers need, and the stages in which they need them.

    Segments are sorted by server, then by position. The ranges of one server do not overlap.
    """

    servers: Ints  # (n,) the server that needs the range
    starts: Ints  # (n,) indices of the pack
    stops: Ints
    # (n,): stages, of which there are `count`. `firsts` and `lasts` consider only foreign queries,
    # until `staged` has assigned a stage to the server's own queries.
    owns: Ints  # −1 if no own query needs the range; otherwise `count`, or the stage after `staged`
    firsts: Ints  # the first stage whose queries need the range, or `count` if no stage needs it
    lasts: Ints  # the last stage whose queries need the range, or −1 if no stage needs it

    @classmethod
    def covering(
        cls, servers: Ints, starts: Ints, stops: Ints, stages: Ints, count: int, tokens: int
    ) -> Segments:
        """Return the segments that some ranges of the pack cover.

        There are `count` stages. `stages[i]` is the stage whose foreign queries need range i, or −1
        if the server's own queries need the range.
        """
        begins, ends = servers * tokens + starts, servers * tokens + stops
        edges = np.unique(np.r_[begins, ends])
        depth = np.zeros((1 + count, edges.size), np.int64)
        np.add.at(depth, (1 + stages, np.searchsorted(edges, begins)), 1)
        np.add.at(depth, (1 + stages, np.searchsorted(edges, ends)), -1)
        covered = depth.cumsum(1)[:, :-1] > 0
        chosen = covered.any(0)
        begins, ends, covered = edges[:-1][chosen], edges[1:][chosen], covered[:, chosen]
        own, covered = covered[0], covered[1:]
        some = covered.any(0)
        firsts = np.where(some, covered.argmax(0), count)
        lasts = np.where(some, count - 1 - covered[::-1].argmax(0), -1)
        labels = np.stack([begins // max(tokens, 1), np.where(own, count, -1), firsts, lasts])
        apart = (labels[:, 1:] != labels[:, :-1]).any(0) | (begins[1:] != ends[:-1])
        first, last = np.r_[True, apart][: begins.size], np.r_[apart, True][: begins.size]
        owners, *needed = labels[:, first]
        start = owners * tokens
        return cls(owners, begins[first] - start, ends[last] - start, *needed)

    @classmethod
    def of_queries(cls, parts: Parts, queries: Geometry, stages: Ints, count: int) -> Segments:
        first = queries.cu_seqlens[parts.documents]
        ranges = first + parts.q_starts, first + parts.q_stops
        return cls.covering(parts.servers, *ranges, stages, count, queries.tokens)

    @classmethod
    def of_keys(cls, parts: Parts, keys: Geometry, stages: Ints, count: int) -> Segments:
        first = keys.cu_seqlens[parts.documents]
        ranges = first + parts.k_starts, first + parts.k_stops
        return cls.covering(parts.servers, *ranges, stages, count, keys.tokens)

    def coming(self, geometry: Geometry) -> Ints:
        """Return how many rows of each segment its server receives from other ranks."""
        coming = self.stops - self.starts
        for server in np.flatnonzero(np.bincount(self.servers)).tolist():
            own = self._slice(server)
            start, stop = self.of(server).rows(geometry, server)
            coming[own] -= stop - start
        return coming

    def stage_edges(self, coming: Ints, count: int, geometry: Geometry) -> Ints:
        """Return the indices of the pack at which each server's stages begin and end, (servers,
        count + 1).
        """
        # A server receives the same number of rows in each stage, except that it receives half as
        # many rows in the first stage, because there is less work during which they can arrive. The
        # rows are assumed to be spread evenly within a segment.
        edges = np.zeros((geometry.ranks, count + 1), np.int64)
        edges[:, 1:] = geometry.tokens
        for server in np.flatnonzero(np.bincount(self.servers)).tolist() if count > 1 else ():
            own = self._slice(server)
            reached, first = np.r_[0, np.cumsum(coming[own])], own.start
            wanted = _edges(reached[-1:], count)[0, 1:-1]
            at = np.maximum(np.searchsorted(reached, wanted) - 1, 0)
            length = (self.stops - self.starts)[first + at]
            inside = length * (wanted - reached[at]) // np.maximum(coming[first + at], 1)
            edges[server, 1:-1] = self.starts[first + at] + inside
        return edges

    def take(self, chosen: RowIndex) -> Segments:
        return Segments(*(column[chosen] for column in self))

    def of(self, server: int) -> Segments:
        own = self._slice(server)
        return Segments(*(column[own] for column in self))

    def staged(self, count: int) -> Segments:
        """Return these segments with a stage for each foreign row that a server's own queries
        need.
        """
        # In each stage, a server's own queries use the same number of these rows, and half as many
        # in the first stage. Keys then arrive early, gradients return early, and foreign queries
        # wait for only a fraction of the server's own work.
        ready, some = self.take(self.owns < 0), self.take(self.owns >= 0)
        columns = np.stack([some.servers, some.firsts, some.lasts])
        alike = np.unique(columns, axis=1, return_inverse=True)[1].ravel()
        order, lengths = np.argsort(alike, kind="stable"), some.stops - some.starts
        some, alike, lengths = some.take(order), alike[order], lengths[order]
        before = np.cumsum(lengths) - lengths
        before -= before[np.searchsorted(alike, alike)]
        edges = _edges(np.bincount(alike, lengths).astype(np.int64)[alike], count)
        index, first, last, stages = cut_ranges(before, before + lengths, edges)
        cut, starts = some.take(index), some.starts[index] + first - before[index]
        cut = cut._replace(
            starts=starts,
            stops=starts + last - first,
            firsts=np.minimum(cut.firsts, stages),
            lasts=np.maximum(cut.lasts, stages),
            owns=stages,
        )
        joined = Segments(*map(np.concatenate, zip(ready, cut, strict=True)))
        return joined.take(np.lexsort((joined.starts, joined.servers)))

    def _slice(self, server: int) -> slice:
        return slice(*np.searchsorted(self.servers, (server, server + 1)).tolist())

    def rows(self, geometry: Geometry, rank: int) -> tuple[Ints, Ints]:
        """Return the starts and stops of a rank's local rows in each segment."""
        holding = geometry.holdings[rank]
        firsts = geometry.cu_seqlens[holding.documents] + holding.starts
        return _rows_before(holding, firsts, self.starts), _rows_before(holding, firsts, self.stops)


def _edges(totals: Ints, count: int) -> Ints:
    """Return the edges of `count` stages for each total, (n, count + 1). The first stage is half as
    long as each later stage.
    """
    reached = np.r_[0, 2 * np.arange(1, count + 1) - 1]
    return totals[:, None] * reached // (2 * count - 1)


def _rows_before(holding: Holding, firsts: Ints, positions: Ints) -> Ints:
    """Return how many local rows come before each index of the pack. `firsts` has the index of each
    local span's first token.
    """
    if not firsts.size:
        return np.zeros_like(positions)
    found = np.searchsorted(firsts, positions, side="right") - 1
    span = np.maximum(found, 0)
    inside = np.minimum(positions - firsts[span], holding.stops[span] - holding.starts[span])
    return np.where(found < 0, 0, holding.offsets[span] + inside)


class Stages(NamedTuple):
    """The stages in which a server needs some foreign rows."""

    # the stage in which the server's own queries need the rows, or −1 if they do not need them
    own: int
    first: int  # the first stage in which any queries need the rows
    last: int  # the last stage in which any queries need the rows


class ServerRows(NamedTuple):
    """The rows of some ranks, one rank after another, as a server stores them."""

    holding: Holding  # the positions of the rows; its "documents" are indices of runs
    documents: Ints  # (runs,) the document of each run
    ranks: list[int]  # (m,) the ranks that own the rows
    counts: list[int]  # (m,) the number of rows of each rank

    @classmethod
    def local(cls, geometry: Geometry, rank: int) -> ServerRows:
        holding = geometry.holdings[rank]
        return cls(holding, np.arange(geometry.lengths.size), [rank], [holding.tokens])

    @classmethod
    def of(cls, table: Ints) -> ServerRows:
        """Return the rows of the spans in a table (4, spans) of ranks, documents, starts and stops,
        in the order of the table.
        """
        ranks, documents, starts, stops = table
        begins = (np.diff(ranks, prepend=-1) != 0) | (np.diff(documents, prepend=-1) != 0)
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
    """The query rows and key rows that ranks send to each other for the tasks of a batch."""

    def __init__(
        self, tasks: TaskRectangles, queries: Geometry, keys: Geometry, mask: Mask, stage_rows: int
    ) -> None:
        """Divide the tasks into stages, so that each server receives about `stage_rows` rows per
        stage.
        """
        # shown in errors if the tasks of ranks differ
        self.described = described(tasks, queries.ranks)
        parts = Parts.of(tasks, queries, keys, mask)
        stage_zero = np.zeros_like(parts.servers)
        of_queries = Segments.of_queries(parts, queries, stage_zero, 1)
        of_keys = Segments.of_keys(parts, keys, stage_zero, 1)
        coming = of_queries.coming(queries)
        needed = (of_queries, coming), (of_keys, of_keys.coming(keys))
        most = max(int(np.bincount(x.servers, rows, 1).max()) for x, rows in needed)
        count = self.stages = min(_MAX_STAGES, max(1, -(-most // stage_rows)))
        edges = of_queries.stage_edges(coming, count, queries)
        self.parts, stages = parts.cut(queries.cu_seqlens[:-1], edges)
        # The rows that servers need, including rows that the servers own.
        self.queries = Segments.of_queries(self.parts, queries, stages, count)
        held = _held(self.parts, queries)
        of_others = np.flatnonzero(self.parts.q_stops - self.parts.q_starts > held)
        own = np.flatnonzero(held)
        needing = self.parts.take(np.r_[of_others, own])
        needed_in = np.r_[stages[of_others], np.full_like(own, -1)]
        self.keys = Segments.of_keys(needing, keys, needed_in, count)

    def of_server(self, rank: int) -> Parts:
        return self.parts.take(self.parts.servers == rank)


def sent_by(rank: int, geometry: Geometry, needed: Segments, stages: int) -> Segments:
    """Return the local rows that a rank sends to servers, as segments of these rows."""
    start, stop = needed.rows(geometry, rank)
    chosen = (stop > start) & (needed.servers != rank)
    return needed._replace(starts=start, stops=stop).take(chosen).staged(stages)


def arriving_at(
    rank: int, geometry: Geometry, needed: Segments, stages: int
) -> dict[Stages, ServerRows]:
    """Return the rows that the server `rank` receives, by the stages in which it needs them."""
    needed, tables = needed.of(rank), [np.empty((7, 0), np.int64)]
    for home in range(geometry.ranks) if needed.starts.size else ():
        start, stop = needed.rows(geometry, home)
        chosen = stop > start
        if home == rank or not chosen.any():
            continue
        rows = needed._replace(starts=start, stops=stop).take(chosen).staged(stages)
        segment, spans = geometry.holdings[home].spans_in(rows.starts, rows.stops)
        labels = np.stack([rows.owns, rows.firsts, rows.lasts])[:, segment]
        tables.append(np.stack([*labels, np.full_like(segment, home), *spans]))
    table = np.concatenate(tables, axis=1)
    kinds, kind = np.unique(table[:3], axis=1, return_inverse=True)
    return {
        Stages(*label): ServerRows.of(table[3:, kind.ravel() == i])
        for i, label in enumerate(kinds.T.tolist())
    }


def _held(parts: Parts, queries: Geometry) -> Ints:
    """Return, for each part, how many of its queries are on the rank that computes the part."""
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
    """Return the slices of some parts of tasks between the query rows and key rows of a server.

    A *part* is a rectangle of query positions and key positions with a range of allowed distances
    k_pos − q_pos. A *slice* is a range of query rows and a range of key rows with a range of
    allowed distances. `shift` (documents,) is added to the positions of queries to align them with
    the keys.
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
    return Slices.of(table, q, k, shift[queries.documents], np.empty((0, 2), np.int64))


def _runs_of(documents: Ints, block: ServerRows) -> tuple[Ints, Ints]:
    """Return two arrays, which list all pairs of an index into `documents` and a run of this
    document in the block.
    """
    runs = block.holding.runs.documents
    order = np.argsort(block.documents[runs], kind="stable")
    found = block.documents[runs][order]
    first = np.searchsorted(found, documents, side="left")
    index, run = enumerated(first, np.searchsorted(found, documents, side="right") - 1)
    return index, runs[order[run]]
