"""`StateStrategy`, the base class of strategies with which ranks exchange states.

A subclass decides how states are sent. LASP-2 sends all states in one exchange. ZeCO sends sums of
states from rank to rank. `routes.py` explains which states are sent to which rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.attention.operands import check_kv_heads
from seqpar.comm.messages.comm import Comm
from seqpar.core.memo import LOCAL, Memo
from seqpar.layout.handle import from_handle
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.final_states import FinalStates, arrival_order
from seqpar.linear.inputs import Gradients, Inputs, check_constant_decay
from seqpar.linear.linear_call import (
    InputForm,
    LinearArguments,
    LinearCall,
    check_settings,
    check_spans,
    shape_of,
)
from seqpar.linear.linear_strategy import BackwardResult, ForwardResult, LinearStrategy, exchanged
from seqpar.linear.routes import StateRoutes, StateSums
from seqpar.linear.states.state_options import (
    MAX_KEPT_DECAYS,
    StateOptions,
    check_values,
    constant_on,
)
from seqpar.linear.states.sums import Sum, WeightedSums


@dataclass(frozen=True)
class StateCall(LinearCall):
    options: StateOptions

    def weigh(self, name: str, sums: Callable[[int], StateSums], device: torch.device) -> Sum:
        """Return a function that computes weighted sums of states, which `sums(rank)` describes.

        The tables of the sums are stored under `name`, so that later calls reuse them.
        """
        tables = self.once_on(device, (name,), lambda: WeightedSums([sums(self.rank)], self.shape))
        return self.options.once(device, tables, tables.weigh)[0]


@dataclass(frozen=True)
class StateStrategy(LinearStrategy[StateCall]):
    """A strategy that exchanges only states, because every rank knows all transitions."""

    family = "linear"
    state_dims = "Hkv, D, Dv"

    def check_shapes(self, inputs: Inputs) -> None:
        check_constant_decay(inputs.log_decay, inputs.k.shape[2], inputs.q.device)

    def check_gates(self, inputs: Inputs) -> None:
        check_kv_heads(inputs.q, inputs.k, inputs.v)

    def to_call(
        self, comm: Comm, arguments: LinearArguments, inputs: Inputs, has_initial_state: bool
    ) -> StateCall:
        layout, shape = from_handle(arguments.layout), shape_of(inputs)
        device, log_decay = inputs.q.device, inputs.log_decay
        # The host does not know values on a GPU. They may be different in the next call.
        known = log_decay is None or log_decay.device.type == "cpu"
        values = None if log_decay is None else tuple(log_decay.tolist()) if known else "unknown"

        def options_of_call() -> StateOptions:
            decay = None if log_decay is None else constant_on(log_decay, device)
            return StateOptions(arguments.scale, arguments.causal, arguments.backend, decay)

        def settle() -> tuple[StateRoutes, StateOptions | None]:
            check_settings(comm, layout, arguments.scale, shape.dtype)
            if log_decay is not None:
                if not arguments.causal:
                    where = "where no token is before another"
                    raise ValueError(f"log_decay must be None with causal=False, {where}")
                check_values(log_decay)
            if arguments.causal:
                check_spans(layout, shape, shape.dim * shape.value_dim, "states")
            routes = StateRoutes.of(
                layout, arguments.causal, arguments.return_state, has_initial_state
            )
            return routes, options_of_call() if known else None

        settled = layout.derived((LOCAL, "settled"), lambda: Memo(MAX_KEPT_DECAYS))
        key = comm.rank, comm.size, shape, has_initial_state, values, device, *arguments[1:]
        routes, options = settled(key, settle)
        if options is None:
            assert log_decay is not None
            check_values(log_decay)
            options = options_of_call()
        return StateCall(comm.rank, layout, routes, shape, InputForm.of(inputs), options)

    def request_tables(self, comm: Comm, call: StateCall, inputs: Inputs, backward: bool) -> None:
        super().request_tables(comm, call, inputs, backward)
        routes, device = call.routes, inputs.q.device
        if routes.has_initial_state and backward:
            call.weigh("dinitial", routes.of_dinitial, device)
        elif routes.has_initial_state:
            call.weigh("initial", routes.of_initial, device)
        if routes.returns_final_state and not backward:
            arrival_order(call, device)

    def forward(
        self, comm: Comm, call: StateCall, inputs: Inputs, initial: Tensor | None
    ) -> ForwardResult:
        routes, device = call.routes, inputs.q.device
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, device, backward=False)
        entering = None if initial is None else call.weigh("initial", routes.of_initial, device)
        steps = begin_forward(inputs, spans, call.options)
        sums = exchanged(exchange, steps.outgoing, steps)
        if initial is not None and entering is not None:
            sums += entering(initial)
        if not routes.returns_final_state:
            out = steps.finish(sums if spans.states_in else None)
            return ForwardResult(out, sums.new_empty((0, *sums.shape[1:])), sums)
        states_in = sums[: spans.states_in]
        final_states = FinalStates(comm, call, sums[spans.states_in :], self.name)
        out = steps.finish(states_in if spans.states_in else None)
        # `states_in` is a view of a larger tensor, which a reference to the view would keep alive.
        return ForwardResult(out, final_states.wait(initial), states_in.clone())

    def backward(
        self,
        comm: Comm,
        call: StateCall,
        inputs: Inputs,
        states_in: Tensor,
        dout: Tensor,
        dfinal: Tensor,
    ) -> BackwardResult:
        routes, q = call.routes, inputs.q
        spans = routes.held(comm.rank).states
        exchange = self.exchange(comm, call, q.device, backward=True)
        entered = states_in if spans.states_in else None
        steps = begin_backward(inputs, dout, spans, call.options, entered)
        states = steps.outgoing
        if routes.returns_final_state:
            states = torch.cat([states, dfinal])
        sums = exchanged(exchange, states, steps)
        dq, dk, dv = steps.finish(sums if spans.states_out else None)[:3]
        gradients = Gradients(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None)
        if not routes.has_initial_state:
            return BackwardResult(gradients, None)
        dinitial = call.weigh("dinitial", routes.of_dinitial, q.device)(states)
        return BackwardResult(gradients, dinitial)
