"""ZeCO's All-Scan: states pass from span to span, each rank adding its own, in blocks.

"ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention" (2025), section 3. A
rank receives one state for each of its spans, however many ranks there are, and sends on λ^L times
what it received plus the state of its span of L rows. A state is cut into K blocks, and a rank
forwards one while it receives the next, so a state passes through P ranks in the time of (P − 2 +
K) / K transfers. States of several documents that take the same step go in one message a block.
Without causality the sum of all states then passes back the same way: two states for each document
that a rank has tokens of.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import Ints, as_int
from seqpar.comm.exchange import Comm, Pending
from seqpar.linear.call import ResolvedCall
from seqpar.linear.chains import Hop, hops_of
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
            Traffic(direction, hop.depth, hop.target, messages, hop.rows.size * call.state_bytes)
            for direction in ("forward", "backward")
            for hop in hops_of(call.routes, rank, direction == "backward")
            if hop.source == rank != hop.target
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
        self._hops = hops_of(routes, comm.rank, backward)
        self._stations = routes.stations(comm.rank, backward).slots.size
        # Without causality a run also has a slot for the sum that it passes on.
        passed_on = 0 if routes.causal else routes.held(comm.rank).documents.size
        self._sums = states.new_zeros((self._stations + passed_on, *states.shape[1:]))
        self._cuts = _block_edges(states.shape[1:4].numel(), blocks)
        self.travels = any(hop.source != hop.target for hop in self._hops)
        self._future: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        if states.is_cuda:
            self._stream = torch.cuda.Stream(states.device)
            self._stream.wait_stream(torch.cuda.current_stream(states.device))
            with torch.cuda.stream(self._stream):
                self._run()
        else:
            threads = ThreadPoolExecutor(1)
            mode = torch.inference_mode(torch.is_inference_mode_enabled())  # a thread's own
            self._future = threads.submit(mode(self._run))
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
        """Take all hops to and from this rank, block by block (`seqpar.linear.chains`)."""
        states, sums = (x.flatten(1, 3) for x in (self._states, self._sums))
        weights = cache(lambda i: self._weights(self._hops[i]))
        arriving: dict[int, list[tuple[Pending, Tensor, Ints]]] = defaultdict(list)
        sent: list[Pending] = []

        def arrive(block: int, part: slice) -> None:
            for pending, buffer, slots in arriving.pop(block, []):
                pending.wait()
                sums[slots, part] += buffer

        blocks = range(len(self._cuts) - 1)
        order = sorted((hop.depth + b, i, b) for i, hop in enumerate(self._hops) for b in blocks)
        for _, i, block in order:
            hop, part = self._hops[i], slice(self._cuts[block], self._cuts[block + 1])
            moving = sums.new_zeros((hop.rows.size, part.stop - part.start, sums.shape[2]))
            if hop.source != self._comm.rank:
                recvs = [(hop.source, moving)]
                pending = self._comm.exchange([], recvs, label=self._label, step=hop.depth)
                arriving[block].append((pending, moving, hop.target_slots))
                continue
            carried, own = (np.flatnonzero(x >= 0) for x in (hop.carries_from, hop.own_states))
            if carried.size:
                arrive(block, part)
                moving[carried] = weights(i)[:, part] * sums[hop.carries_from[carried], part]
            moving[own] += states[hop.own_states[own], part]
            if hop.target == self._comm.rank:
                sums[hop.target_slots, part] += moving
            else:
                sends = [(hop.target, moving)]
                sent.append(self._comm.exchange(sends, [], label=self._label, step=hop.depth))
        for block in blocks:
            arrive(block, slice(self._cuts[block], self._cuts[block + 1]))
        for pending in sent:
            pending.wait()

    def _weights(self, hop: Hop) -> Tensor:
        """Return (carried, B·Hkv·D, 1): λ^rows of the hop's links that carry a sum."""
        batch, heads, dim, _ = self._states.shape[1:]
        powers = decay_weights(self._options, hop.rows[hop.carries_from >= 0], self._states)
        return powers.expand(-1, batch, heads, dim, 1).flatten(1, 3)


def _block_edges(rows: int, blocks: int) -> list[int]:
    """Return where a state, as a matrix of B·Hkv·D rows, is cut into blocks."""
    edges: list[int] = np.linspace(0, rows, blocks + 1).astype(int).tolist()
    return edges
