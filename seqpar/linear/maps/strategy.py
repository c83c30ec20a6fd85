"""The base class of recurrent transports: how states get to the spans that they enter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.linear.final_states import (
    FinalGradients,
    FinalStates,
    final_gradients_traffic,
    final_states_traffic,
)
from seqpar.linear.inputs import Gradients, Inputs
from seqpar.linear.kinds import Kind, kind
from seqpar.linear.maps.attend import begin_backward, begin_forward
from seqpar.linear.maps.call import ResolvedCall
from seqpar.linear.maps.chain import Ends
from seqpar.linear.maps.maps import Maps
from seqpar.linear.states.strategy import ForwardResult


class MapExchange(Protocol):
    """An exchange of maps, from which a rank gets the states that enter its spans.

    The same exchange passes gradients of states back, with the maps of backward. `travels` says
    whether anything is sent or received, which computation should then hide.
    """

    travels: bool

    def post(self, maps: Maps) -> None:
        """Begin to send this rank's maps; of heads (`chain.py`) only the states are read."""

    def wait(self) -> Tensor:
        """Return the states that enter spans, (stations, B, H, K, V), by slot.

        Those that enter heads may be anything.
        """


class BackwardResult(NamedTuple):
    """What a transport's backward returns.

    Attributes:
        gradients: of the inputs.
        dinitial: (documents, B, H, K, V), whose sum over ranks is the gradient of the initial
            states; None if there were none.
    """

    gradients: Gradients
    dinitial: Tensor | None


@dataclass(frozen=True)
class RecurrentStrategy:
    """What moves between ranks, forward and backward, for one kind of recurrence.

    Its fields are its options, and `str()` must show all of them: modules of the same string on one
    group share a BoundStrategy.
    """

    name: ClassVar[str] = "recurrent"
    routable: ClassVar[bool]
    transport: ClassVar[str]  # what users call it
    kind_name: str

    @property
    def kind(self) -> Kind:
        """The kind of recurrence."""
        return kind(self.kind_name)

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> MapExchange:
        """Return the exchange of a pass, before its maps are known."""
        raise NotImplementedError

    def maps_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return what a rank sends in an exchange, by pass, step and peer, from geometry alone."""
        raise NotImplementedError

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return what a rank sends, by pass, step and peer, from geometry alone."""
        ends = [*final_states_traffic(call, rank), *final_gradients_traffic(call, rank)]
        return [*self.maps_traffic(call, rank), *ends]

    def forward(
        self, comm: Comm, call: ResolvedCall, inputs: Inputs, initial: Tensor | None
    ) -> ForwardResult:
        """Return the attention of this rank's queries over the tokens of all ranks."""
        routes, device = call.routes, inputs.q.device
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, device, backward=False)
        ends = _ends(comm, call, device, backward=False)
        steps = begin_forward(call.kind, inputs, spans, call.options)
        entering = None if initial is None else initial.index_select(0, ends.of_heads)
        maps, states_in = _pass(call.kind, exchange, ends, steps, entering)
        entered = states_in if spans.states_in else None
        if not routes.returns_final_state:
            none = states_in.new_empty((0, *states_in.shape[1:]))
            return ForwardResult(steps.finish(entered), none, states_in)
        final_states = FinalStates(comm, call, ends.leave(call.kind, maps, states_in), self.name)
        out = steps.finish(entered)
        return ForwardResult(out, final_states.wait(initial), states_in)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        inputs: Inputs,
        states_in: Tensor,
        dout: Tensor,
        dfinal: Tensor,
    ) -> BackwardResult:
        """Return the gradients of this rank's inputs and of the initial states.

        `states_in` is that of the forward's result. `dfinal` has the gradients of the final states,
        (documents, B, H, K, V), or (0, …) if they were not returned.
        """
        routes, device = call.routes, inputs.q.device
        spans = routes.held(comm.rank).states
        final_gradients = None
        if routes.returns_final_state:
            final_gradients = FinalGradients(comm, call, dfinal, self.name)
        exchange = self.exchange(comm, call, device, backward=True)
        ends = _ends(comm, call, device, backward=True)
        entered = states_in if spans.states_in else None
        steps = begin_backward(call.kind, inputs, dout, spans, call.options, entered)
        entering = None if final_gradients is None else final_gradients.wait()
        maps, dstates_out = _pass(call.kind, exchange, ends, steps, entering)
        gradients = steps.finish(dstates_out if spans.states_out else None)
        if not routes.has_initial_state:
            return BackwardResult(gradients, None)
        dinitial = states_in.new_zeros((routes.lengths.size, *states_in.shape[1:]))
        if ends.without_tokens is not None and routes.returns_final_state:
            dinitial.index_copy_(
                0, ends.without_tokens, dfinal.index_select(0, ends.without_tokens)
            )
        dinitial.index_copy_(0, ends.documents, ends.leave(call.kind, maps, dstates_out))
        return BackwardResult(gradients, dinitial)


def _ends(comm: Comm, call: ResolvedCall, device: torch.device, backward: bool) -> Ends:
    routes = call.routes
    return call.once(("ends", backward, device), lambda: Ends(routes, comm.rank, backward, device))


def _pass(
    kind: Kind, exchange: MapExchange, ends: Ends, steps: Any, entering: Tensor | None
) -> tuple[Maps, Tensor]:
    """Return a pass's maps, and the states that enter all spans, of which `entering` enter heads.

    What does not depend on these states is computed while maps travel.
    """
    maps: Maps = steps.maps
    if entering is not None:
        maps = ends.enter(kind, maps, entering)
    exchange.post(maps)
    if exchange.travels:
        steps.local()
    states = exchange.wait()
    if entering is not None:
        ends.begin(states, entering)
    return maps, states
