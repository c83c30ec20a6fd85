"""The base class of strategies of linear attention: how states get to the spans that need them.

*Sources* are a rank's states, and *stations* the places that need sums of states; `routes.py`
defines both, and the slots of tensors in which they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.linear.final_states import FinalStates, final_states_traffic
from seqpar.linear.states.attend import begin_backward, begin_forward
from seqpar.linear.states.call import ResolvedCall


class ForwardResult(NamedTuple):
    """What a strategy's forward returns.

    Attributes:
        out: (B, T_local, Hq, Dv), in q's dtype.
        final_states: (documents, B, Hkv, D, Dv), or (0, …) if they are not returned.
        states_in: (states_in, B, Hkv, D, Dv), the states that entered the rank's spans, which
            backward needs.
    """

    out: Tensor
    final_states: Tensor
    states_in: Tensor


class StateExchange(Protocol):
    """An exchange of states, from which a rank gets the sums at its stations.

    The weights of states are computed when it is made, before there are any states: then nothing
    that must be sent waits for them. `travels` says whether anything is sent or received, which
    computation should then hide.
    """

    travels: bool

    def post(self, states: Tensor) -> None:
        """Send this rank's states, by slot of its sources, towards the stations that need them."""

    def wait(self) -> Tensor:
        """Return the sums, (stations, B, Hkv, D, Dv), by slot."""


@dataclass(frozen=True)
class LinearStrategy:
    """What moves between ranks, forward and backward.

    Its fields are its options, and `str()` must show all of them: modules of the same string on one
    group share a BoundStrategy. States are (n, B, Hkv, D, Dv) throughout, in fp32 (fp64 for fp64).
    """

    name: ClassVar[str]
    routable: ClassVar[bool] = True
    transport: ClassVar[str]  # what LASP2Attention's users call it

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> StateExchange:
        """Return the exchange of a pass, before its states are known."""
        raise NotImplementedError

    def states_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return what a rank sends in an exchange, by pass, step and peer, from geometry alone."""
        raise NotImplementedError

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return what a rank sends, by pass, step and peer, from geometry alone."""
        return [*self.states_traffic(call, rank), *final_states_traffic(call, rank)]

    def forward(
        self,
        comm: Comm,
        call: ResolvedCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
    ) -> ForwardResult:
        """Return the linear attention of this rank's queries over the keys of all ranks."""
        routes = call.routes
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, q.device, backward=False)
        entering = None if initial is None else call.weigh("initial", routes.of_initial, q.device)
        steps = begin_forward(q, k, v, spans, call.options)
        exchange.post(steps.states)
        if exchange.travels:
            steps.local()
        sums = exchange.wait()
        if initial is not None and entering is not None:
            sums += entering(initial)
        if not routes.returns_final_state:
            out = steps.finish(sums if spans.states_in else None)
            return ForwardResult(out, sums.new_empty((0, *sums.shape[1:])), sums)
        states_in = sums[: spans.states_in]
        final_states = FinalStates(comm, call, sums[spans.states_in :], self.name)
        out = steps.finish(states_in if spans.states_in else None)
        # A copy does not keep the others alive.
        return ForwardResult(out, final_states.wait(initial), states_in.clone())

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states_in: Tensor,
        dout: Tensor,
        dfinal: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dv of this rank's tokens, and if there were initial states, theirs.

        `states_in` is that of the forward's result. `dfinal` has the gradients of the final states,
        (documents, B, Hkv, D, Dv), or (0, …) if they were not returned.
        """
        routes = call.routes
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, q.device, backward=True)
        entered = states_in if spans.states_in else None
        steps = begin_backward(q, k, v, dout, spans, call.options, entered)
        states = torch.cat([steps.states, dfinal]) if routes.returns_final_state else steps.states
        exchange.post(states)
        if exchange.travels:
            steps.local()
        sums = exchange.wait()
        gradients = steps.finish(sums if spans.states_out else None)
        if not routes.has_initial_state:
            return gradients
        return *gradients, call.weigh("dinitial", routes.of_dinitial, q.device)(states)
