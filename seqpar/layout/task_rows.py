"""Decide which rows travel for tasks, from whom to whom, and in which stage.

The queries that a server needs are put in order and cut into stages, so that results of one stage
return while the next one is computed. A key travels to a server once, in the first stage that needs
it. Positions here count from the start of the packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqpar.arguments import Ints
from seqpar.layout.geometry import Geometry, Holding
from seqpar.layout.mask import Mask
from seqpar.layout.ranges import split_at
from seqpar.layout.task_parts import Parts
from seqpar.layout.tasks import Tasks


class Block(NamedTuple):
    """Rows of several ranks, one after another, as one of their servers has them.

    Attributes:
        holding: the rows' positions. Where it says documents, it has numbers of runs.
        documents: (runs,) of each run.
        ranks: (m,) whose rows they are; the same rank for each of its messages.
        counts: (m,) how many rows come from each, in order.
    """

    holding: Holding
    documents: Ints
    ranks: list[int]
    counts: list[int]

    @classmethod
    def local(cls, geometry: Geometry, rank: int) -> Block:
        """Return all that a rank holds."""
        holding = geometry.holdings[rank]
        return cls(holding, np.arange(geometry.lengths.size), [rank], [holding.tokens])

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """Return the rows of several blocks, one after another."""
        first_run = np.cumsum([0] + [block.documents.size for block in blocks])
        runs = [x.holding.documents + i for x, i in zip(blocks, first_run[:-1], strict=True)]
        starts, stops = [x.holding.starts for x in blocks], [x.holding.stops for x in blocks]
        return cls(
            Holding((np.concatenate(runs), np.concatenate(starts), np.concatenate(stops))),
            np.concatenate([x.documents for x in blocks]),
            [rank for x in blocks for rank in x.ranks],
            [count for x in blocks for count in x.counts],
        )


class Segments(NamedTuple):
    """Ranges of positions that servers need, ascending by server, then position; disjoint.

    Attributes:
        servers: (n,) who needs them.
        starts, stops: (n,) positions.
        stages: (n,) in which stage.
    """

    servers: Ints
    starts: Ints
    stops: Ints
    stages: Ints

    @classmethod
    def covering(
        cls, servers: Ints, starts: Ints, stops: Ints, stages: Ints, count: int, tokens: int
    ) -> Segments:
        """Return all that some ranges cover, each position in the first stage that has it.

        There are `count` stages, and `tokens` positions.
        """
        begins, ends = servers * tokens + starts, servers * tokens + stops
        edges = np.unique(np.r_[begins, ends])
        depth = np.zeros((count, edges.size), np.int64)
        np.add.at(depth, (stages, np.searchsorted(edges, begins)), 1)
        np.add.at(depth, (stages, np.searchsorted(edges, ends)), -1)
        covered = depth.cumsum(1)[:, :-1] > 0
        chosen = covered.any(0)
        begins, ends, stages = edges[:-1][chosen], edges[1:][chosen], covered.argmax(0)[chosen]
        servers = begins // max(tokens, 1)
        apart = np.ones(begins.size, bool)
        apart[1:] = (begins[1:] != ends[:-1]) | (stages[1:] != stages[:-1])
        apart[1:] |= servers[1:] != servers[:-1]
        first = np.flatnonzero(apart)
        last = np.r_[first[1:], begins.size][: first.size] - 1
        offsets = servers[first] * tokens
        return cls(servers[first], begins[first] - offsets, ends[last] - offsets, stages[first])

    def of(self, server: int) -> Segments:
        """Return those of one server."""
        first, last = np.searchsorted(self.servers, (server, server + 1)).tolist()
        return Segments(*(column[first:last] for column in self))

    def rows(self, geometry: Geometry, rank: int) -> tuple[Ints, Ints]:
        """Return which local rows [start, stop) of a rank are in each segment."""
        holding = geometry.holdings[rank]
        firsts = geometry.cu_seqlens[holding.documents] + holding.starts
        return _rows_before(holding, firsts, self.starts), _rows_before(holding, firsts, self.stops)


def _rows_before(holding: Holding, firsts: Ints, positions: Ints) -> Ints:
    """Count the local rows before each position; `firsts` are those at which spans begin."""
    if not firsts.size:
        return np.zeros_like(positions)
    found = np.searchsorted(firsts, positions, side="right") - 1
    span = np.maximum(found, 0)
    inside = np.minimum(positions - firsts[span], holding.stops[span] - holding.starts[span])
    return np.where(found < 0, 0, holding.offsets[span] + inside)


class TaskRows:
    """What of a batch travels for its tasks.

    Attributes:
        stages: how many there are; the same on all ranks.
        parts: of all tasks, cut into stages.
        queries, keys: what servers need, their own rows included.
    """

    def __init__(
        self, tasks: Tasks, queries: Geometry, keys: Geometry, mask: Mask, rows_of_stage: int
    ) -> None:
        """Cut the work into stages, each of at most so many rows of others for a server.

        There are at most `_MOST_STAGES`.
        """
        parts = Parts.of(tasks, queries, keys, mask)
        needed = _needed(parts, queries, np.zeros_like(parts.servers), 1)
        guests = _guests(needed, queries)
        most = int(np.bincount(needed.servers, guests, 1).max())
        self.stages = min(_MOST_STAGES, max(1, -(-most // rows_of_stage)))
        edges = _stage_edges(needed, guests, self.stages, queries)
        self.parts, stages = parts.cut(queries.cu_seqlens[:-1], edges)
        self.queries = _needed(self.parts, queries, stages, self.stages)
        first = keys.cu_seqlens[self.parts.documents]
        ranges = first + self.parts.k_starts, first + self.parts.k_stops
        self.keys = Segments.covering(self.parts.servers, *ranges, stages, self.stages, keys.tokens)

    def of_server(self, rank: int) -> Parts:
        """Return the parts that a rank computes."""
        return self.parts.take(self.parts.servers == rank)


def sent_by(rank: int, geometry: Geometry, needed: Segments) -> Segments:
    """Return which of its rows a rank sends, to which servers: segments of local rows."""
    start, stop = needed.rows(geometry, rank)
    chosen = (stop > start) & (needed.servers != rank)
    return Segments(needed.servers[chosen], start[chosen], stop[chosen], needed.stages[chosen])


def arriving_at(rank: int, geometry: Geometry, needed: Segments, stages: int) -> list[Block]:
    """Return the rows of others that arrive at a rank, which is a server, in each stage."""
    needed, tables = needed.of(rank), [np.empty((5, 0), np.int64)]
    for home in range(geometry.ranks) if needed.starts.size else ():
        start, stop = needed.rows(geometry, home)
        if home == rank or not (stop > start).any():
            continue
        holding = geometry.holdings[home]
        span, first, last = split_at(holding.offsets, start, stop)
        segment = np.searchsorted(stop, holding.offsets[span] + first, side="right")
        columns = needed.stages[segment], np.full_like(span, home), holding.documents[span]
        positions = holding.starts[span]
        tables.append(np.stack([*columns, positions + first, positions + last]))
    table = np.concatenate(tables, axis=1)
    return [_block(table[1:, table[0] == stage]) for stage in range(stages)]


_MOST_STAGES = 4  # of which the first has nothing to hide under but work at home


def _needed(parts: Parts, queries: Geometry, stages: Ints, count: int) -> Segments:
    """Return the queries that servers need."""
    first = queries.cu_seqlens[parts.documents]
    ranges = first + parts.q_starts, first + parts.q_stops
    return Segments.covering(parts.servers, *ranges, stages, count, queries.tokens)


def _guests(needed: Segments, queries: Geometry) -> Ints:
    """Return how many rows of each segment its server does not hold."""
    guests = needed.stops - needed.starts
    for server in np.unique(needed.servers).tolist():
        start, stop = needed.of(server).rows(queries, server)
        guests[needed.servers == server] -= stop - start
    return guests


def _stage_edges(needed: Segments, guests: Ints, count: int, queries: Geometry) -> Ints:
    """Return (ranks, count + 1): between which positions a server's stages lie.

    Each stage has about as many rows of others. Within a segment they are taken to lie evenly.
    """
    ranks = queries.ranks
    edges = np.zeros((ranks, count + 1), np.int64)
    edges[:, 1:] = queries.tokens
    reached = np.cumsum(guests)
    for stage in range(1, count):
        for server in np.unique(needed.servers).tolist():
            first, last = np.searchsorted(needed.servers, (server, server + 1)).tolist()
            before = int(reached[first] - guests[first])
            wanted = before + (int(reached[last - 1]) - before) * stage // count
            at = min(first + int(np.searchsorted(reached[first:last], wanted)), last - 1)
            inside = guests[at] - (reached[at] - wanted)
            length = needed.stops[at] - needed.starts[at]
            edges[server, stage] = needed.starts[at] + length * inside // max(1, guests[at])
    return edges


def _block(table: Ints) -> Block:
    """Return the rows of one stage, as columns of home, document, start and stop, in order."""
    homes, documents, starts, stops = table
    begins = np.ones(homes.size, bool)
    begins[1:] = (homes[1:] != homes[:-1]) | (documents[1:] != documents[:-1])
    run = np.cumsum(begins) - 1
    ranks, first = np.unique(homes, return_index=True)
    counts = np.add.reduceat(stops - starts, first) if first.size else first
    return Block(Holding((run, starts, stops)), documents[begins], ranks.tolist(), counts.tolist())
