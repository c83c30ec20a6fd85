"""`MapStrategy`, the base class of strategies with which ranks exchange maps.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state before the span to the state after the span (`maps.py`). A subclass decides
how maps are sent and combined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import LOCAL, MAX_KEPT_SETTINGS, Memo
from seqpar.layout.handle import from_handle
from seqpar.linear.attend import HookedSteps, begin_backward, begin_forward
from seqpar.linear.final_states import FinalGradients, FinalStates, arrival_order, ended_documents
from seqpar.linear.inputs import Inputs, check_gates, check_heads
from seqpar.linear.kinds import Kind, kind
from seqpar.linear.linear_call import (
    InputForm,
    LinearArguments,
    LinearCall,
    check_settings,
    check_spans,
    shape_of,
)
from seqpar.linear.linear_strategy import (
    BackwardResult,
    Exchange,
    ForwardResult,
    LinearStrategy,
    exchanged,
)
from seqpar.linear.maps.ends import Ends
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import Maps, elements
from seqpar.linear.routes import StateRoutes


@dataclass(frozen=True)
class MapCall(LinearCall):
    options: MapOptions

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        s = self.shape
        return s.batch, s.kv_heads, elements(self.options.kind, s.dim, s.value_dim)

    @property
    def map_bytes(self) -> int:
        return math.prod(self.packed_shape) * accumulator_dtype(self.shape.dtype).itemsize


@dataclass(frozen=True)
class MapStrategy(LinearStrategy[MapCall]):
    """A strategy that exchanges maps, because a rank does not know the transitions of other
    ranks.
    """

    name: ClassVar[str] = "recurrent"
    family = "recurrent"
    state_dims = "H, K, V"
    kind_name: str

    @property
    def kind(self) -> Kind:
        return kind(self.kind_name)

    def described(self) -> dict[str, object]:
        return {"kind": self.kind_name, **super().described()}

    def check_shapes(self, inputs: Inputs) -> None:
        check_heads(inputs)

    def check_gates(self, inputs: Inputs) -> None:
        check_gates(self.kind, inputs, "B, T_local")

    def to_call(
        self, comm: Comm, arguments: LinearArguments, inputs: Inputs, has_initial_state: bool
    ) -> MapCall:
        layout, shape, kind = from_handle(arguments.layout), shape_of(inputs), self.kind

        def settle() -> StateRoutes:
            check_settings(comm, layout, arguments.scale, shape.dtype)
            check_spans(layout, shape, elements(kind, shape.dim, shape.value_dim), "maps")
            return StateRoutes.of(layout, True, arguments.return_state, has_initial_state)

        settled = layout.derived((LOCAL, "settled recurrent"), lambda: Memo(MAX_KEPT_SETTINGS))
        key = comm.rank, comm.size, kind, shape, has_initial_state, *arguments[1:]
        routes = settled(key, settle)
        options = MapOptions(kind, arguments.scale, arguments.backend)
        return MapCall(comm.rank, layout, routes, shape, InputForm.of(inputs), options)

    def request_tables(self, comm: Comm, call: MapCall, inputs: Inputs, backward: bool) -> None:
        super().request_tables(comm, call, inputs, backward)
        device = inputs.q.device
        _ends(call, device, backward)
        if call.routes.returns_final_state:
            (ended_documents if backward else arrival_order)(call, device)

    def forward(
        self, comm: Comm, call: MapCall, inputs: Inputs, initial: Tensor | None
    ) -> ForwardResult:
        routes, device = call.routes, inputs.q.device
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, device, backward=False)
        ends = _ends(call, device, backward=False)
        steps = begin_forward(inputs, spans, call.options)
        entering = None if initial is None else initial.index_select(0, ends.of_heads)
        maps, states_in = _pass(call.options.kind, exchange, ends, steps, entering)
        entered = states_in if spans.states_in else None
        if not routes.returns_final_state:
            none = states_in.new_empty((0, *states_in.shape[1:]))
            return ForwardResult(steps.finish(entered), none, states_in)
        left = ends.leave(call.options.kind, maps, states_in)
        final_states = FinalStates(comm, call, left, self.name)
        out = steps.finish(entered)
        return ForwardResult(out, final_states.wait(initial), states_in)

    def backward(
        self,
        comm: Comm,
        call: MapCall,
        inputs: Inputs,
        states_in: Tensor,
        dout: Tensor,
        dfinal: Tensor,
    ) -> BackwardResult:
        routes, device = call.routes, inputs.q.device
        spans = routes.held(comm.rank).states
        final_gradients = None
        if routes.returns_final_state:
            final_gradients = FinalGradients(comm, call, dfinal, self.name)
        exchange = self.exchange(comm, call, device, backward=True)
        ends = _ends(call, device, backward=True)
        entered = states_in if spans.states_in else None
        steps = begin_backward(inputs, dout, spans, call.options, entered)
        entering = None if final_gradients is None else final_gradients.wait()
        maps, dstates_out = _pass(call.options.kind, exchange, ends, steps, entering)
        gradients = steps.finish(dstates_out if spans.states_out else None)
        if not routes.has_initial_state:
            return BackwardResult(gradients, None)
        dinitial = states_in.new_zeros((routes.lengths.size, *states_in.shape[1:]))
        empty = ends.without_tokens
        if empty is not None and routes.returns_final_state:
            dinitial.index_copy_(0, empty, dfinal.index_select(0, empty))
        dinitial.index_copy_(0, ends.documents, ends.leave(call.options.kind, maps, dstates_out))
        return BackwardResult(gradients, dinitial)


def _ends(call: MapCall, device: torch.device, backward: bool) -> Ends:
    routes, rank = call.routes, call.rank
    return call.once_on(device, ("ends", backward), lambda: Ends(routes, rank, backward))


def _pass(
    kind: Kind,
    exchange: Exchange[Maps],
    ends: Ends,
    steps: HookedSteps[Maps, Any],
    entering: Tensor | None,
) -> tuple[Maps, Tensor]:
    """Run the exchange of a pass. Return the maps of this rank's spans, and the states that enter
    these spans.

    `entering` has the states that enter the first spans of documents.
    """
    maps = steps.outgoing
    if entering is not None:
        maps = ends.enter(kind, maps, entering)
    states = exchanged(exchange, maps, steps)
    if entering is not None:
        ends.begin(states, entering)
    return maps, states
