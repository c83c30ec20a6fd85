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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpar.arguments import as_int
from seqpar.comm.exchange import Comm, Pending
from seqpar.linear.beside import run_beside
from seqpar.linear.call import ResolvedCall
from seqpar.linear.chains import hops_of
from seqpar.linear.rounds import Place, PlannedHop, Rounds, blocks_of
from seqpar.linear.strategy import LinearStrategy, StateExchange
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class ZeCO(LinearStrategy):
    """States are passed on from span to span."""

    name = "zeco"
    transport = "scan"
    blocks: int = 4  # into which a state is cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_int("blocks", self.blocks, 1, 2**20))

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> StateExchange:
        return ScannedStates(comm.channel("scan"), call, device, backward, self.blocks)

    def states_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        row = call.state_bytes // (call.shape.batch * call.shape.kv_heads * call.shape.dim or 1)
        cuts = blocks_of(call.shape, self.blocks)
        return [
            Traffic(direction, hop.depth + block, hop.target, 1, total)
            for direction in ("forward", "backward")
            for hop in hops_of(call.routes, rank, direction == "backward")
            for block, cut in enumerate(cuts)
            if hop.source == rank != hop.target
            and (total := hop.rows.size * (cut.stop - cut.start) * row)
        ]


class ScannedStates:
    """The sums of states at a rank's stations, while states are passed on.

    A thread passes them on, or on a GPU a stream, so that the rank computes while states that it
    must pass on have not arrived yet.
    """

    def __init__(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool, blocks: int
    ) -> None:
        rank, routes, shape = comm.rank, call.routes, call.shape
        self._plan = call.once(
            ("rounds", backward, blocks, device),
            lambda: Rounds(routes, rank, backward, blocks, shape, device),
        )
        self._comm, self._stations = comm, routes.stations(rank, backward).slots.size
        self._label = f"zeco {'backward' if backward else 'forward'}"
        self._weights = self._plan.weights(call.options)
        self.travels = self._plan.travels

    def post(self, states: Tensor) -> None:
        self._states = states
        self._sums = states.new_zeros((self._stations, *states.shape[1:]))
        self._join: Callable[[], None] | None = None
        if self.travels:
            weights = [x for x in self._weights if x is not None]
            self._join = run_beside(self._run, states, self._sums, *weights)
        else:
            self._run()

    def wait(self) -> Tensor:
        if self._join is not None:
            self._join()
        return self._sums

    def _run(self) -> None:
        """Take all hops to and from this rank, round by round (`seqpar.linear.rounds`)."""
        plan, states = self._plan, self._states.flatten(1, 3)
        blocks = [
            _Block(plan, states[:, cut], weights)
            for cut, weights in zip(plan.cuts, self._weights, strict=True)
        ]
        arriving: list[tuple[Pending, list[Place]]] = []
        sent: list[Pending] = []

        def arrive() -> None:
            for pending, reached in arriving:
                pending.wait()
                for hop, block in reached:
                    blocks[block].add(hop)
            arriving.clear()

        for number, hops in plan.rounds.items():
            sends, recvs, reached = [], [], []
            for hop, block in hops:
                if hop.carriers is not None:
                    arrive()
                if hop.links is None:
                    recvs.append((hop.source, blocks[block].arrivals[hop.arrivals]))
                elif hop.arrivals is None:
                    sends.append((hop.target, blocks[block].leave(hop)))
                else:
                    blocks[block].arrivals[hop.arrivals] = blocks[block].leave(hop)
                if hop.arrivals is not None:
                    reached.append((hop, block))
            pending = self._comm.exchange(sends, recvs, label=self._label, step=number)
            if reached:
                arriving.append((pending, reached))
            else:
                sent.append(pending)
        arrive()
        sums = self._sums.flatten(1, 3)
        for cut, part in zip(plan.cuts, blocks, strict=True):
            sums[plan.slots, cut] = part.arrivals[plan.sums]
        for pending in sent:
            pending.wait()


class _Block:
    """A block of all states: of those that leave the rank, and of those that reach it."""

    def __init__(self, plan: Rounds, states: Tensor, weights: Tensor | None) -> None:
        self._weights = weights
        if plan.pads:
            states = pad(states, (0, 0, 0, 0, 0, 1))  # by one of zeros
        self._links = states.index_select(0, plan.states)
        self.arrivals = states.new_empty((plan.arriving, *states.shape[1:]))

    def leave(self, hop: PlannedHop) -> Tensor:
        """Return what a hop takes from the rank, once the sums that it carries have arrived."""
        if hop.carriers is not None:
            carried, links = self.arrivals[hop.carried], self._links[hop.carriers]
            if self._weights is None:
                links.add_(carried)
            else:
                links.addcmul_(carried, self._weights[hop.carriers])
        return self._links[hop.links]

    def add(self, hop: PlannedHop) -> None:
        """Add what a hop has brought to stations that something had reached before."""
        if hop.added is not None:
            to, what = hop.added
            self.arrivals[to] += self.arrivals[what]
