"""ZeCO's All-Scan: states pass from span to span, each rank adding its own, in blocks.

"ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (2025), section 3. A
rank receives one state for each of its spans, however many ranks there are, and sends on λ^L times
what it received plus the state of its span of L rows. A state is cut into K blocks, and a rank
forwards one while it receives the next, so a state passes through P ranks in the time of (P − 2 +
K) / K transfers. Without causality the sum of all states then passes back the same way: two states
for each document that a rank has tokens of.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import as_int
from seqpar.comm.exchange import Comm, Pending
from seqpar.linear.call import ResolvedCall
from seqpar.linear.chains import links_of
from seqpar.linear.routes import decay_weights
from seqpar.linear.strategy import LinearStrategy, PendingStates
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class ZeCO(LinearStrategy):
    """States are passed on from span to span."""

    name = "zeco"
    transport = "scan"
    blocks: int = 4  # into which a state is cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_int("blocks", self.blocks, 1, 2**20))

    def post(self, comm: Comm, call: ResolvedCall, states: Tensor, backward: bool) -> PendingStates:
        return ScannedStates(comm, call, states, backward, self.blocks)

    def states_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        shape = call.shape
        cuts = _block_edges(shape.batch * shape.kv_heads * shape.dim, self.blocks)
        messages = int(np.count_nonzero(np.diff(cuts)))  # blocks without rows are not sent
        return [
            Traffic(direction, link.depth, link.target, messages, call.state_bytes)
            for direction in ("forward", "backward")
            for link in links_of(call.routes, rank, direction == "backward")
            if link.source == rank != link.target
        ]


class ScannedStates:
    """The sums of states at a rank's stations, while states are passed on.

    A thread passes them on, or on a GPU a stream, so that the rank computes while states that it
    must pass on have not arrived yet.
    """

    def __init__(
        self, comm: Comm, call: ResolvedCall, states: Tensor, backward: bool, blocks: int
    ) -> None:
        routes = call.routes
        self._comm, self._states, self._options = comm, states, call.options
        self._label = f"zeco {'backward' if backward else 'forward'}"
        self._links = links_of(routes, comm.rank, backward)
        self._stations = routes.stations(comm.rank, backward).slots.size
        # Without causality a run also has a slot for the sum that it passes on.
        passed_on = 0 if routes.causal else routes.held(comm.rank).documents.size
        self._sums = states.new_zeros((self._stations + passed_on, *states.shape[1:]))
        self._cuts = _block_edges(states.shape[1:4].numel(), blocks)
        self.travels = any(link.source != link.target for link in self._links)
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
        """Return the sums, (stations, B, Hkv, D, Dv), by slot."""
        if self._future is not None:
            self._future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._states.device).wait_stream(self._stream)
        return self._sums[: self._stations]

    @torch.no_grad()
    def _run(self) -> None:
        """Take all links to and from this rank, block by block (`seqpar.linear.chains`)."""
        states, sums = (x.flatten(1, 3) for x in (self._states, self._sums))
        arriving: dict[tuple[int, int], list[tuple[Pending, Tensor]]] = defaultdict(list)
        weight = cache(self._weight)

        def arrived(slot: int, block: int, part: slice) -> Tensor:
            for pending, buffer in arriving.pop((slot, block), []):
                pending.wait()
                sums[slot, part] += buffer
            return sums[slot, part]

        sent: list[Pending] = []
        blocks = range(len(self._cuts) - 1)
        order = [(link, block) for link in self._links for block in blocks]
        for link, block in sorted(order, key=lambda pair: (pair[0].depth + pair[1], *pair)):
            part = slice(self._cuts[block], self._cuts[block + 1])
            if link.source != self._comm.rank:
                buffer = torch.empty_like(sums[link.target_slot, part])
                recvs = [(link.source, buffer)]
                pending = self._comm.exchange([], recvs, label=self._label, step=link.depth)
                arriving[link.target_slot, block].append((pending, buffer))
                continue
            if link.carries_from < 0:
                leaving = states[link.own_state, part]
            else:
                leaving = weight(link.rows)[part] * arrived(link.carries_from, block, part)
                if link.own_state >= 0:
                    leaving = leaving + states[link.own_state, part]
            if link.target == self._comm.rank:
                sums[link.target_slot, part] += leaving
            else:
                sends = [(link.target, leaving)]
                sent.append(self._comm.exchange(sends, [], label=self._label, step=link.depth))
        for slot, block in list(arriving):
            arrived(slot, block, slice(self._cuts[block], self._cuts[block + 1]))
        for pending in sent:
            pending.wait()

    def _weight(self, rows: int) -> Tensor:
        """Return (B·Hkv·D, 1): λ^rows."""
        batch, heads, dim, _ = self._states.shape[1:]
        powers = decay_weights(self._options, np.array([rows]), self._states)
        return powers[0].expand(batch, heads, dim, 1).reshape(-1, 1)


def _block_edges(rows: int, blocks: int) -> list[int]:
    """Return where a state, as a matrix of B·Hkv·D rows, is cut into blocks."""
    edges: list[int] = np.linspace(0, rows, blocks + 1).astype(int).tolist()
    return edges
