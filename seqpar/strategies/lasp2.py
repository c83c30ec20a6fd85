"""LASP-2: ranks exchange states of linear attention, once forward and once backward.

Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid" (2025), algorithms 1 to 4: each rank
computes the states of its tokens, posts them, computes what its tokens owe to each other while they travel, and then adds
what they owe to earlier tokens. Here the states are those of spans, so any layout will do, and each rank is sent just what its
spans need: for contiguous and zigzag layouts at most one state of a document from every other rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from seqpar import linear
from seqpar.comm import Comm
from seqpar.geometry import as_int
from seqpar.linear import Recurrence
from seqpar.strategies.scan import Scanned
from seqpar.strategies.states import Plan, add_earlier, weights

TRANSPORTS = ("all_gather", "scan")


class Gathered:
    """The sums of states at a rank's stations, on their way: every rank sends each other what that one needs, at once."""

    def __init__(self, comm: Comm, plan: Plan, states: Tensor, recurrence: Recurrence, reverse: bool) -> None:
        self._rank, self._plan, self._states, self._recurrence, self._reverse = comm.rank, plan, states, recurrence, reverse
        others = comm.others
        routes = [plan.route(comm.rank, peer, reverse) for peer in others]
        sends = [(peer, route.compose(states, recurrence)) for peer, route in zip(others, routes, strict=True)]
        self._routes = [plan.route(peer, comm.rank, reverse) for peer in range(comm.size)]
        self._arriving = [states.new_empty((len(route.stations), *states.shape[1:])) for route in self._routes]
        self._pending = comm.exchange(sends, [(peer, self._arriving[peer]) for peer in others])
        self.travels = any(len(states) for _, states in sends) or any(len(self._arriving[peer]) for peer in others)

    def wait(self) -> Tensor:
        stations = self._plan.stations(self._rank, self._reverse)
        sums = self._states.new_zeros((len(stations.slots), *self._states.shape[1:]))
        self._arriving[self._rank] = self._routes[self._rank].compose(self._states, self._recurrence)
        self._pending.wait()
        for route, arrived in zip(self._routes, self._arriving, strict=True):  # in rank order
            route.arrive(sums, arrived, self._recurrence)
        add_earlier(sums, stations, self._recurrence)
        return sums


@dataclass(frozen=True)
class LASP2:
    """Its fields are its options. States are (n, B, Hkv, D, Dv) throughout, in fp32 (fp64)."""

    transport: str
    blocks: int

    name: ClassVar[str] = "lasp2"

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        as_int("blocks", self.blocks, 1)

    def forward(
        self,
        comm: Comm,
        plan: Plan,
        recurrence: Recurrence,
        operands: tuple[Tensor, Tensor, Tensor],
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out (B, T, Hq, Dv) in q's dtype, the documents' final states (or none), and what entered the spans, for backward."""
        spans, stations = plan.pieces(comm.rank).spans, plan.stations(comm.rank, reverse=False)
        work = linear.forward(*operands, spans, recurrence)
        flight = self._post(comm, plan, work.states, recurrence, reverse=False)
        if flight.travels:
            work.local()
        sums = flight.wait()
        if initial is not None:
            sums[stations.slots] += initial[stations.documents] * weights(recurrence, stations.positions, sums)
        entered = sums[: spans.entering]
        return work.finish(entered if spans.entering else None), sums[spans.entering :].clone(), entered.clone()

    def backward(
        self,
        comm: Comm,
        plan: Plan,
        recurrence: Recurrence,
        operands: tuple[Tensor, Tensor, Tensor],
        entered: Tensor,
        dout: Tensor,
        dstate: Tensor,
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv of this rank's tokens, and the gradient of the initial states if there were any.

        `dstate` has the gradients of the final states, or none.
        """
        spans, sources = plan.pieces(comm.rank).spans, plan.sources(comm.rank, reverse=True)
        work = linear.backward(*operands, dout, spans, recurrence, entered if spans.entering else None)
        states = torch.cat([work.states, dstate]) if plan.returned else work.states
        flight = self._post(comm, plan, states, recurrence, reverse=True)
        if flight.travels:
            work.local()
        left = flight.wait()
        gradients = work.finish(left if spans.leaving else None)
        if not plan.begun:
            return gradients
        lengths = plan.lengths
        dinitial = states.new_zeros((lengths.size, *states.shape[1:]))
        from_start = lengths[sources.documents] - sources.positions if plan.causal else np.zeros_like(sources.positions)
        index = torch.from_numpy(sources.documents).to(states.device)
        return *gradients, dinitial.index_add_(0, index, states[sources.slots] * weights(recurrence, from_start, states))

    def _post(self, comm: Comm, plan: Plan, states: Tensor, recurrence: Recurrence, reverse: bool) -> Gathered | Scanned:
        if self.transport == "scan":
            return Scanned(comm, plan, states, recurrence, reverse, self.blocks)
        return Gathered(comm, plan, states, recurrence, reverse)
