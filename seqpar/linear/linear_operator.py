"""The torch operators that compute a call of linear attention.

A *state* is a matrix for each head, which summarises earlier tokens of a document. A *span* is a
range of consecutive tokens of a document on one rank. The operators return `out`, the final state
of each document, and the state before each span of this rank. Backward needs the states before
spans. In this file, states are (n, B, H, K, V), so the batch is the second dimension. In the
arguments of a module, the batch is the first dimension.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operators import (
    CallOperator,
    Compared,
    Results,
    Saved,
    differentiated,
    unit_stride,
)
from seqpar.attention.rehearsal import upload_tables
from seqpar.comm.agreement import Described
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.handle import described
from seqpar.linear.inputs import CallTensors, Inputs
from seqpar.linear.linear_call import CARRIED, LinearArguments, LinearCall
from seqpar.linear.linear_strategy import LinearStrategy

Bound = BoundStrategy[LinearStrategy[LinearCall]]
_INPUTS = len(Inputs._fields)


class LinearOperator(CallOperator[CallTensors, LinearArguments, LinearCall]):
    name = "linear_attention"
    outs = 2  # out and the final states

    def __init__(self) -> None:
        super().__init__(CallTensors, LinearArguments)

    def resolve(self, bound: Bound, tensors: CallTensors, arguments: LinearArguments) -> LinearCall:
        return bound.strategy.resolve(bound.comm, arguments, tensors.inputs, tensors.initial)

    def agreed(
        self, bound: Bound, call: LinearCall, arguments: LinearArguments, exact: bool
    ) -> Described:
        return {
            **bound.strategy.described(),
            **call.form.described(),
            "layout": described(arguments.layout, exact),
            "initial_state": call.routes.has_initial_state,
            **CARRIED.agreed(arguments),
        }

    def key(self, call: LinearCall, arguments: LinearArguments) -> Hashable:
        return call.form, call.routes.has_initial_state, *arguments[1:]

    def compared(self, tensors: CallTensors, arguments: LinearArguments) -> Compared:
        return _compared(tensors.inputs)

    def has_gradient(self, tensors: CallTensors) -> list[bool]:
        return [*_differentiable(tensors.inputs), tensors.initial is not None]

    def forward(
        self,
        strategy: LinearStrategy[LinearCall],
        comm: Comm,
        call: LinearCall,
        tensors: CallTensors,
        arguments: LinearArguments,
    ) -> Results:
        inputs = tensors.inputs
        upload_tables(strategy, comm, call, inputs.q.device, differentiated(tensors))
        out, final, entered = strategy.forward(comm, call, _unit_strides(inputs), tensors.initial)
        return Results([out, final], [entered])

    def empty(self, bound: Bound, tensors: CallTensors, arguments: LinearArguments) -> Results:
        inputs, q = tensors.inputs, tensors.q
        counts = arguments.documents if arguments.return_state else 0, arguments.states_in
        dtype = accumulator_dtype(q.dtype)
        final, entered = (
            q.new_empty((count, *inputs.state_shape), dtype=dtype) for count in counts
        )
        return Results([q.new_empty(inputs.out_shape), final], [entered])

    def save(
        self,
        bound: Bound,
        tensors: CallTensors,
        arguments: LinearArguments,
        outs: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> Saved:
        *inputs, initial = tensors
        return Saved([*inputs, *kept], [] if initial is None else [*initial.shape])

    def resolve_again(
        self, bound: Bound, comm: Comm, arguments: LinearArguments, saved: Saved
    ) -> tuple[LinearCall, Compared]:
        inputs, has_initial_state = _saved_inputs(saved), bool(saved.sizes)
        arguments = bound.strategy.with_backend(arguments, inputs)
        call = bound.strategy.to_call(comm, arguments, inputs, has_initial_state)
        return call, _compared(inputs)

    def backward(
        self,
        strategy: LinearStrategy[LinearCall],
        comm: Comm,
        call: LinearCall,
        gradients: Sequence[Tensor | None],
        saved: Saved,
    ) -> list[Tensor]:
        inputs, entered, (dout, dfinal) = _saved_inputs(saved), saved.tensors[-1], gradients
        assert entered is not None
        if dout is None:
            dout = inputs.q.new_zeros(inputs.out_shape)
        if dfinal is None:
            documents = call.layout.lengths.size if call.routes.returns_final_state else 0
            dfinal = entered.new_zeros((documents, *entered.shape[1:]))
        of_inputs, dinitial = strategy.backward(
            comm, call, _unit_strides(inputs), entered, unit_stride(dout), dfinal
        )
        pairs = zip(_differentiable(inputs), of_inputs, strict=True)
        wanted = [gradient for some, gradient in pairs if some]
        return [x.contiguous() for x in (*wanted, dinitial) if x is not None]

    def empty_gradients(self, arguments: LinearArguments, saved: Saved) -> list[Tensor]:
        inputs, contiguous = _saved_inputs(saved), torch.contiguous_format
        pairs = zip(inputs, _differentiable(inputs), strict=True)
        wanted = [x for x, some in pairs if x is not None and some]
        gradients = [torch.empty_like(x, memory_format=contiguous) for x in wanted]
        if saved.sizes:
            dtype = accumulator_dtype(inputs.q.dtype)
            gradients.append(inputs.q.new_empty(saved.sizes, dtype=dtype))
        return gradients

    # The FLOPs are those of the recurrent form, in which each token costs the same. Forward adds
    # the outer product k·vᵀ (K × V) to the state, and multiplies the state with q. Backward repeats
    # the outer product. It also has two products with gradients of out, for q and for states, and
    # two products with gradients of states, for k and for v. By the delta rule, a token also reads
    # the state with its key, which doubles the products of states. A multiplication with an
    # addition counts as 2 FLOPs. Kernels compute in chunks, and take more FLOPs.
    def flops(self, tensors: CallTensors, arguments: LinearArguments) -> int:
        outputs, states = _product_flops(tensors.inputs)
        return outputs + states

    def backward_flops(self, arguments: LinearArguments, saved: Saved) -> int:
        outputs, states = _product_flops(_saved_inputs(saved))
        return 2 * outputs + 3 * states


LINEAR_ATTENTION = LinearOperator().registered()


def _saved_inputs(saved: Saved) -> Inputs:
    inputs: Any = saved.tensors[:_INPUTS]
    return Inputs(*inputs)


def _differentiable(inputs: Inputs) -> list[bool]:
    """Return whether each input has a gradient. A constant decay has none."""
    constant = inputs.log_decay is not None and inputs.log_decay.dim() == 1
    return [x is not None and not (constant and x is inputs.log_decay) for x in inputs]


def _compared(inputs: Inputs) -> Compared:
    constant = inputs.log_decay is not None and inputs.log_decay.dim() == 1
    return {"log_decay": inputs.log_decay if constant else None}


def _unit_strides(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else unit_stride(x) for x in inputs))  # type: ignore[arg-type]


def _product_flops(inputs: Inputs) -> tuple[int, int]:
    """Return the FLOPs of matrix products in forward: for outputs, and for states."""
    batch, rows, heads, value_dim = inputs.out_shape
    per_head = 2 * batch * rows * inputs.q.shape[3] * value_dim
    return per_head * heads, per_head * inputs.heads * (1 if inputs.beta is None else 2)
