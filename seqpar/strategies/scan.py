"""All-Scan: states pass from span to span, each rank adding its own, in blocks that follow one another.

"ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (2025), section 3. A rank receives one state for
each of its spans, however many ranks there are, and sends on λ^L · received + own. With a state cut into K blocks a rank
forwards one while it receives the next, so that P ranks are passed in (P − 2 + K) / K transfers of a state.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Pending
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
    own: int  # slot of the source's state
    via: int  # slot of the station at which what it passes on arrives, or −1
    rows: int  # over which that decays
    slot: int  # of the target's station


class Scanned:
    """The sums of states at a rank's stations, on their way: on a CPU a thread passes them on, on a GPU a stream."""

    def __init__(self, comm: Comm, plan: Plan, states: Tensor, recurrence: Recurrence, reverse: bool, blocks: int) -> None:
        self._comm, self._states, self._recurrence = comm, states, recurrence
        self._edges = edges_of(plan, comm.rank, reverse)
        self.sums = states.new_zeros((len(plan.stations(comm.rank, reverse).slots), *states.shape[1:]))
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
        return self.sums

    @torch.no_grad()
    def _run(self) -> None:
        states, sums = (x.flatten(1, 3) for x in (self._states, self.sums))
        arriving: dict[tuple[int, int], list[tuple[Pending, Tensor]]] = defaultdict(list)
        weight = cache(lambda rows: self._weight(rows))

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
            leaving = states[edge.own, part]
            if edge.via >= 0:
                leaving = leaving + weight(edge.rows)[part] * arrived(edge.via, block, part)
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
        table = _chains(plan, reverse)
        mine = table[(table[:, 2] == rank) | (table[:, 3] == rank)]
        plan.lowered[key] = [Edge(*row) for row in mine.tolist()]
    return plan.lowered[key]


def _chains(plan: Plan, reverse: bool) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """All links of all documents, as rows of what an `Edge` has."""
    ranks = range(len(plan.holdings))
    pieces = [plan.pieces(rank) for rank in ranks]
    holder = np.repeat(ranks, [piece.documents.size for piece in pieces])
    columns = [[p.documents, p.starts, p.stops, p.spans.enter, p.spans.leave] for p in pieces]
    document, start, stop, enter, leave = np.concatenate(columns, axis=1)
    order = np.lexsort((start, document))
    document, start, stop, enter, leave, holder = (x[order] for x in (document, start, stop, enter, leave, holder))
    first = np.flatnonzero(np.diff(document, prepend=-1))
    count = np.diff(np.r_[first, document.size])
    number = np.arange(document.size) - np.repeat(first, count)
    last = first + count - 1
    i = np.flatnonzero(np.diff(document, append=-1) == 0)
    j, rows = i + 1, stop - start
    if reverse:
        depth = np.repeat(count, count) - number
        links = [np.stack([depth[j], document[j], holder[j], holder[i], enter[j], leave[j], rows[j], leave[i]], 1)]
    else:
        via = np.where(number > 0, enter, -1)
        links = [np.stack([number[i], document[i], holder[i], holder[j], leave[i], via[i], rows[i], enter[j]], 1)]
    for rank in ranks if plan.returned else ():
        end = pieces[rank].spans.entering + document[last]
        same, none = np.full_like(last, rank), np.full_like(last, -1)
        if reverse:
            links.append(np.stack([none, document[last], same, holder[last], end, none, 0 * end, leave[last]], 1))
        else:
            ends = [number[last], document[last], holder[last], same, leave[last], via[last], rows[last], end]
            links.append(np.stack(ends, 1))
    return np.concatenate(links)
