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
from seqpar.linear.rounds import Carrying, Round, Rounds, blocks_of
from seqpar.linear.strategy import LinearStrategy, StateExchange
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class ZeCO(LinearStrategy):
    """States are passed on from span to span."""

    name = "zeco"
    transport = "scan"
    routable = False  # a rank skips the rounds in which it has nothing to do
    blocks: int = 4  # into which a state is cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_int("blocks", self.blocks, 1, 2**20))

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> StateExchange:
        return ScannedStates(comm.channel("scan"), call, device, backward, self.blocks)

    def states_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        blocks = blocks_of(call.shape, self.blocks)
        block_bytes = call.state_bytes // blocks
        return [
            Traffic(direction, hop.depth + block, hop.target, 1, hop.rows.size * block_bytes)
            for direction in ("forward", "backward")
            for hop in hops_of(call.routes, rank, direction == "backward")
            for block in range(blocks)
            if hop.source == rank != hop.target
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
        self._comm = comm
        self._label = f"zeco {'backward' if backward else 'forward'}"
        options, plan = call.options, self._plan
        self._weights = options.derived(plan, lambda: plan.weights(options))
        self.travels = self._plan.travels

    def post(self, states: Tensor) -> None:
        self._states = states
        self._sums = states.new_empty((self._plan.stations, *states.shape[1:]))
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
        plan = self._plan
        shape = plan.rows, self._states.shape[-1]
        states = self._states.reshape(len(self._states) * plan.blocks, *shape)
        if plan.pads:
            states = pad(states, (0, 0, 0, 0, 0, 1))  # by a block of zeros
        messages = states.index_select(0, plan.states).split_with_sizes(plan.leaving)
        arrivals = states.new_empty((plan.arrivals, *shape))
        *places, zeros = arrivals.split_with_sizes(plan.reaching)
        if plan.reaching[-1]:
            zeros.zero_()
        arriving: list[tuple[Pending, Round]] = []
        sent: list[Pending] = []
        for now in plan.rounds:
            if now.carrying:
                _arrive(arriving, arrivals)
            for carrying in now.carrying:
                self._add(messages[carrying.message], carrying, arrivals[carrying.carried])
            for message, place in now.kept:
                places[place].copy_(messages[message])
            sends = [(peer, messages[message]) for peer, message in now.sends]
            recvs = [(peer, places[place]) for peer, place in now.recvs]
            pending = self._comm.exchange(sends, recvs, label=self._label, step=now.number)
            if now.reaches:
                arriving.append((pending, now))
            else:
                sent.append(pending)
        _arrive(arriving, arrivals)
        sums = self._sums.view(len(plan.sums), *shape)
        torch.index_select(arrivals, 0, plan.sums, out=sums)
        for pending in sent:
            pending.wait()

    def _add(self, message: Tensor, carrying: Carrying, carried: Tensor) -> None:
        """Add the sums that a message carries on, which have decayed on the way."""
        weights = self._weights[carrying.message]
        if carrying.carriers is not None:
            message = message[: carrying.carriers]
        if weights is None:
            message.add_(carried)
        else:
            message.addcmul_(carried, weights)


def _arrive(arriving: list[tuple[Pending, Round]], arrivals: Tensor) -> None:
    """Wait for what is arriving, and add what reaches a station after something else has."""
    for pending, reached in arriving:
        pending.wait()
        for to, what in reached.added:
            arrivals[to] += arrivals[what]
    arriving.clear()
