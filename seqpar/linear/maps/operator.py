"""The operators that a recurrent call lowers to: one forward and one backward.

They communicate too; `seqpar.softmax.operator` says why. States are (n, B, H, K, V): here the batch
is the second dimension, unlike in the module's arguments. The results are out, the final states,
`entered`, which has the states that entered this rank's spans, and `numbers`, the call's, (ranks,).
`dfinal` has the gradients of the final states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operands import digest_of_call
from seqpar.attention.operators import (
    implementation,
    refuse_double_backward,
    refuse_transforms,
    register_autograd,
    unit_stride,
    without_autocast,
)
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.sequence_numbers import empty_numbers
from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Inputs
from seqpar.linear.maps.call import (
    SCHEMA,
    CallArguments,
    ResolvedCall,
    described,
    resolve,
    shape_of,
)
from seqpar.linear.maps.strategy import RecurrentStrategy

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta"
torch.library.define(
    "seqpar::recurrent_attention", f"({_INPUTS}, Tensor? initial, {SCHEMA}) -> Tensor[] results"
)
torch.library.define(
    "seqpar::recurrent_attention_backward",
    f"(Tensor? dout, Tensor? dfinal, {_INPUTS}, bool has_initial_state, Tensor entered, "
    f"Tensor numbers, {SCHEMA}) -> Tensor[] gradients",
)
_FIELDS = len(Inputs._fields)


def _described(strategy: RecurrentStrategy, inputs: Inputs) -> dict[str, Any]:
    return {"kind": strategy.kind_name, "transport": strategy.transport} | described(inputs)


@implementation("seqpar::recurrent_attention")
def _recurrent_attention(*tensors_and_carried: Any) -> list[Tensor]:
    inputs = Inputs(*tensors_and_carried[:_FIELDS])
    initial, *carried = tensors_and_carried[_FIELDS:]
    arguments = CallArguments(*carried)
    bound: BoundStrategy[RecurrentStrategy] = BoundStrategy.of(arguments.strategy)
    begun, device = initial is not None, inputs.q.device
    call, comm = bound.resolve_checked(
        device,
        partial(resolve, bound.comm, bound.strategy.kind, arguments, inputs, initial),
        lambda canonical: _described(bound.strategy, inputs) | arguments.shared(begun, canonical),
    )
    _describe(comm, bound, arguments, call, inputs, begun)
    bound.announce("forward")
    comm = bound.routed(
        comm,
        device,
        "forward",
        lambda: _described(bound.strategy, inputs) | arguments.shared(begun, False),
    )
    with without_autocast(inputs.q):
        result = bound.strategy.forward(comm, call, _unit_strides(inputs), initial)
        return [*result, comm.numbers.as_tensor()]


def _describe(
    comm: Comm,
    bound: BoundStrategy[RecurrentStrategy],
    arguments: CallArguments,
    call: ResolvedCall,
    inputs: Inputs,
    begun: bool,
) -> None:
    """Have the headers of a call's messages carry a digest of its arguments."""
    if not comm.has_headers(inputs.q.device):
        return
    _, k, v, log_decay, beta = inputs
    constant = None if log_decay is None or log_decay.dim() > 1 else log_decay
    gates = [None if x is None else (x.dim(), x.dtype) for x in (log_decay, beta)]

    def described(canonical: bool) -> dict[str, Any]:
        shared = arguments.shared(begun, canonical)
        return shared | {
            **call.shape.described(),
            "strategy": str(bound.strategy),
            "routing": str(bound.routing),
            "kind": bound.strategy.kind_name,
            "transport": bound.strategy.transport,
            "heads of k": k.shape[2],
            "heads of v": v.shape[2],
            "log_decay": str(gates[0]),
            "beta": str(gates[1]),
        }

    key = "recurrent", call.shape, begun, k.shape[2], v.shape[2], *gates, *arguments.settings()
    digest = digest_of_call(call.layout, key, described)
    comm.digest = digest.extended(log_decay=constant)


@torch.library.register_fake("seqpar::recurrent_attention")  # type: ignore[untyped-decorator]
def _recurrent_attention_fake(*tensors_and_carried: Any) -> list[Tensor]:
    inputs = Inputs(*tensors_and_carried[:_FIELDS])
    arguments = CallArguments(*tensors_and_carried[_FIELDS + 1 :])
    counts = arguments.documents if arguments.return_state else 0, arguments.states_in
    dtype, q = accumulator_dtype(inputs.q.dtype), inputs.q
    states = (q.new_empty((count, *inputs.state_shape), dtype=dtype) for count in counts)
    bound: BoundStrategy[RecurrentStrategy] = BoundStrategy.of(arguments.strategy)
    numbers = empty_numbers(bound.comm.size)
    return [q.new_empty(inputs.out_shape), *states, numbers]


@implementation("seqpar::recurrent_attention_backward")
def _recurrent_attention_backward(
    dout: Tensor | None, dfinal: Tensor | None, *tensors_and_carried: Any
) -> list[Tensor]:
    inputs = Inputs(*tensors_and_carried[:_FIELDS])
    has_initial_state, entered, numbers, *carried = tensors_and_carried[_FIELDS:]
    arguments = CallArguments(*carried)
    bound: BoundStrategy[RecurrentStrategy] = BoundStrategy.of(arguments.strategy)
    if dout is None:
        dout = inputs.q.new_zeros(inputs.out_shape)
    dout = unit_stride(dout)
    if dfinal is None:
        documents = arguments.documents if arguments.return_state else 0
        dfinal = entered.new_zeros((documents, *entered.shape[1:]))
    bound.announce("backward")
    with without_autocast(inputs.q):
        comm = bound.comm.call(numbers)
        call = arguments.to_call(comm, bound.strategy.kind, shape_of(inputs), has_initial_state)
        _describe(comm, bound, arguments, call, inputs, has_initial_state)
        comm = bound.routed(
            comm,
            inputs.q.device,
            "backward",
            lambda: _described(bound.strategy, inputs) | arguments.shared(has_initial_state, False),
        )
        gradients, dinitial = bound.strategy.backward(
            comm, call, _unit_strides(inputs), entered, dout, dfinal
        )
        return [x.contiguous() for x in (*gradients, dinitial) if x is not None]


@torch.library.register_fake("seqpar::recurrent_attention_backward")  # type: ignore[untyped-decorator]
def _recurrent_attention_backward_fake(
    dout: Tensor | None, dfinal: Tensor | None, *tensors_and_carried: Any
) -> list[Tensor]:
    inputs = Inputs(*tensors_and_carried[:_FIELDS])
    has_initial_state, entered, _, *carried = tensors_and_carried[_FIELDS:]
    contiguous = torch.contiguous_format
    gradients = [torch.empty_like(x, memory_format=contiguous) for x in inputs if x is not None]
    if has_initial_state:
        documents = CallArguments(*carried).documents
        gradients.append(entered.new_empty((documents, *entered.shape[1:])))
    return gradients


def _unit_strides(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else unit_stride(x) for x in inputs))  # type: ignore[arg-type]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    *tensors, initial = inputs[: _FIELDS + 1]
    arguments = CallArguments(*inputs[_FIELDS + 1 :])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(results[3])
    ctx.settings = arguments.settings()
    ctx.has_initial_state = initial is not None
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handles = arguments.layout  # hooks may copy saved tensors
    ctx.save_for_backward(*arguments.tensors(), *tensors, *results[2:])


def _differentiate(
    ctx: Any, dout: Tensor | None, dfinal: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    layout, *tensors, entered, numbers = ctx.saved_tensors
    arguments = CallArguments(layout, *ctx.settings)
    found = torch.ops.seqpar.recurrent_attention_backward(
        dout, dfinal, *tensors, ctx.has_initial_state, entered, numbers, *arguments
    )
    gradients = iter(found)
    given = [*(x is not None for x in tensors), ctx.has_initial_state]
    return tuple(next(gradients) if some else None for some in given)


register_autograd("seqpar::recurrent_attention", _FIELDS + 1, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::recurrent_attention_backward", refuse_double_backward)
refuse_transforms("seqpar::recurrent_attention")
