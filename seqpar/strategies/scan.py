"""All-Scan: states pass from span to span, each rank adding its own, in blocks that follow one another.

"ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (2025), section 3. A rank receives one state for
each of its spans, however many ranks there are, and sends on λ^L · received + own. With a state cut into K blocks a rank
forwards one while it receives the next, so that P ranks are passed in (P − 2 + K) / K transfers of a state. Without causality
the sum of all states then passes back the same way: two states for each document that a rank has tokens of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Pending
from seqpar.geometry import Ints, numbers
from seqpar.linear import Recurrence
from seqpar.strategies.states import Plan, weights


class Edge(NamedTuple):
    """A link of a document's chain: what leaves a rank's span enters the next span, or arrives at the document's end.

    In this order all ranks take the links that concern them, so none waits for another that waits for it.
    """

    depth: int
    document: int
    source: int  # rank
    target: int
    own: int  # slot of the source's state, or −1
    via: int  # slot of the station at which what it passes on arrives, or −1
    rows: int  # over which that decays
    slot: int  # of the target's station, or behind these, of what a run passes on


class Scanned:
    """The sums of states at a rank's stations, on their way: on a CPU a thread passes them on, on a GPU a stream."""

    def __init__(self, comm: Comm, plan: Plan, states: Tensor, recurrence: Recurrence, reverse: bool, blocks: int) -> None:
        self._comm, self._states, self._recurrence = comm, states, recurrence
        self._edges = edges_of(plan, comm.rank, reverse)
        self._stations = len(plan.stations(comm.rank, reverse).slots)
        passing = 0 if plan.causal else len(plan.pieces(comm.rank).documents)
        self._sums = states.new_zeros((self._stations + passing, *states.shape[1:]))
        self._cuts = np.linspace(0, states.shape[1] * states.shape[2] * states.shape[3], blocks + 1).astype(int).tolist()
        self.travels = any(edge.source != edge.target for edge in self._edges)
        self._future: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        if states.is_cuda:
            self._stream = torch.cuda.Stream(states.device)
            self._stream.wait_stream(torch.cuda.current_stream(states.device))
            with torch.cuda.stream(self._stream):
                self._run()
        else:
            threads = ThreadPoolExecutor(1)
            self._future = threads.submit(self._run)
            threads.shutdown(wait=False)

    def wait(self) -> Tensor:
        if self._future is not None:
            self._future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._states.device).wait_stream(self._stream)
        return self._sums[: self._stations]

    @torch.no_grad()
    def _run(self) -> None:
        states, sums = (x.flatten(1, 3) for x in (self._states, self._sums))
        arriving: dict[tuple[int, int], list[tuple[Pending, Tensor]]] = defaultdict(list)
        weight = cache(self._weight)

        def arrived(slot: int, block: int, part: slice) -> Tensor:
            for pending, buffer in arriving.pop((slot, block), []):
                pending.wait()
                sums[slot, part] += buffer
            return sums[slot, part]

        sent: list[Pending] = []
        count = len(self._cuts) - 1
        for edge, block in sorted(
            ((edge, block) for edge in self._edges for block in range(count)), key=lambda x: (x[0].depth + x[1], *x)
        ):
            part = slice(self._cuts[block], self._cuts[block + 1])
            if edge.source != self._comm.rank:
                buffer = torch.empty_like(sums[edge.slot, part])
                pending = self._comm.exchange([], [(edge.source, buffer)], edge.depth)
                arriving[edge.slot, block].append((pending, buffer))
                continue
            if edge.via < 0:
                leaving = states[edge.own, part]
            else:
                leaving = weight(edge.rows)[part] * arrived(edge.via, block, part)
                leaving = leaving + states[edge.own, part] if edge.own >= 0 else leaving
            if edge.target == self._comm.rank:
                sums[edge.slot, part] += leaving
            else:
                sent.append(self._comm.exchange([(edge.target, leaving)], [], edge.depth))
        for slot, block in list(arriving):
            arrived(slot, block, slice(self._cuts[block], self._cuts[block + 1]))
        for pending in sent:
            pending.wait()

    def _weight(self, rows: int) -> Tensor:
        """(B·Hkv·D, 1): λ^rows."""
        batch, heads, dim, _ = self._states.shape[1:]
        powers = weights(self._recurrence, np.array([rows]), self._states)
        return powers[0].expand(batch, heads, dim, 1).reshape(-1, 1)


def edges_of(plan: Plan, rank: int, reverse: bool) -> list[Edge]:
    """The links to and from a rank."""
    key = "scan", rank, reverse
    if key not in plan.lowered:
        table = np.concatenate(_chains(plan, reverse) if plan.causal else _rounds(plan, reverse))
        mine = table[(table[:, 2] == rank) | (table[:, 3] == rank)]
        plan.lowered[key] = [Edge(*row) for row in mine.tolist()]
    return plan.lowered[key]


class _Runs(NamedTuple):
    """Who holds what, in the documents' order: spans, or without causality runs."""

    holder: Ints  # rank
    document: Ints
    rows: Ints
    enter: Ints  # slots
    leave: Ints
    number: Ints  # in its document
    behind: Ints  # how many of the document follow

    @classmethod
    def of(cls, plan: Plan) -> _Runs:
        pieces = [plan.pieces(rank) for rank in range(len(plan.holdings))]
        holder = np.repeat(np.arange(len(pieces)), [piece.documents.size for piece in pieces])
        columns = [[p.documents, p.starts, p.stops, p.spans.enter, p.spans.leave] for p in pieces]
        document, start, stop, enter, leave = np.concatenate(columns, axis=1)
        order = np.lexsort((holder, start, document))
        count = np.unique(document, return_counts=True)[1]
        number = numbers(count)
        held = (x[order] for x in (holder, document, stop - start, enter, leave))
        return cls._make([*held, number, np.repeat(count, count) - 1 - number])


def _links(*columns: Any) -> Ints:
    """Rows of what an `Edge` has, from columns that are arrays or all the same."""
    return np.stack(np.broadcast_arrays(*columns), axis=1)


def _chains(plan: Plan, reverse: bool) -> list[Ints]:
    """All links of all documents."""
    r = _Runs.of(plan)
    last = np.flatnonzero(r.behind == 0)
    i = np.flatnonzero(r.behind)
    j, via, made = i + 1, np.where(r.number > 0, r.enter, -1), []
    if reverse:
        made.append(
            _links(r.behind[j] + 1, r.document[j], r.holder[j], r.holder[i], r.enter[j], r.leave[j], r.rows[j], r.leave[i])
        )
    else:
        made.append(_links(r.number[i], r.document[i], r.holder[i], r.holder[j], r.leave[i], via[i], r.rows[i], r.enter[j]))
    documents, holder = r.document[last], r.holder[last]
    for rank, end in _ends(plan, documents):
        if reverse:
            made.append(_links(0, documents, rank, holder, end, -1, 0, r.leave[last]))
        else:
            made.append(_links(r.number[last], documents, holder, rank, r.leave[last], via[last], r.rows[last], end))
    return made


def _rounds(plan: Plan, reverse: bool) -> list[Ints]:
    """The same without causality: sums pass from run to run of a document, and that at the last one passes back."""
    r = _Runs.of(plan)
    last = np.flatnonzero(r.behind == 0)
    i = np.flatnonzero(r.behind)
    j, run = i + 1, r.enter  # which is also what leaves
    passing = run + np.array([len(plan.stations(rank, reverse).slots) for rank in range(len(plan.holdings))])[r.holder]
    via = np.where((r.number > 0) | (reverse and plan.returned), passing, -1)
    back = r.number + 2 * r.behind + 2
    documents, holder = r.document[last], r.holder[last]
    made = [
        _links(
            r.number[i], r.document[i], r.holder[i], r.holder[j], run[i], np.where(r.number > 0, passing, -1)[i], 0, passing[j]
        ),
        _links(r.number[last], documents, holder, holder, run[last], via[last], 0, run[last]),
        _links(back[j], r.document[j], r.holder[j], r.holder[i], -1, run[j], 0, run[i]),
    ]
    for rank, end in _ends(plan, documents):
        if reverse:
            made.append(_links(-1, documents, rank, holder, end, -1, 0, passing[last]))
        else:
            made.append(_links(r.number[last] + 1, documents, holder, rank, -1, run[last], 0, end))
    return made


def _ends(plan: Plan, documents: Ints) -> Iterator[tuple[int, Ints]]:
    """The slots of documents' ends on each rank, if final states are returned."""
    for rank in range(len(plan.holdings)) if plan.returned else ():
        yield rank, plan.pieces(rank).spans.entering + documents
