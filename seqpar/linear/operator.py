"""The operator that every call of linear attention lowers to, and the operator of its backward.

Both also communicate; `seqpar.softmax.operator` explains why. Their strategy decides which of two
families computes a call: `states/` or `maps/`. States are (n, B, H, K, V): the batch is the second
dimension here, unlike in a module's arguments.

The forward returns out, the final states, `entered` (the states that entered this rank's spans),
and `numbers`, the sequence numbers of the call (ranks,). `dfinal` is the gradient of the final
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.attention.operands import OperandShape, digest_of_call
from seqpar.attention.operators import (
    FLOP_FORMULAS,
    implementation,
    in_order,
    refuse_double_backward,
    refuse_transforms,
    register_autograd,
    unit_stride,
    without_autocast,
)
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.header import CallDigest, empty_numbers
from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.call import SCHEMA, CallArguments, ResolvedCall
from seqpar.linear.inputs import Inputs
from seqpar.linear.rehearsal import upload_tables
from seqpar.linear.strategy import LinearStrategy

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta"
torch.library.define(
    "seqpar::linear_attention", f"({_INPUTS}, Tensor? initial, {SCHEMA}) -> Tensor[] results"
)
torch.library.define(
    "seqpar::linear_attention_backward",
    f"(Tensor? dout, Tensor? dfinal, {_INPUTS}, bool has_initial_state, Tensor entered, "
    f"Tensor numbers, {SCHEMA}) -> Tensor[] gradients",
)
_FIELDS = len(Inputs._fields)
Bound = BoundStrategy[LinearStrategy[ResolvedCall]]


@implementation("seqpar::linear_attention")
def _linear_attention(*operands: Any) -> list[Tensor]:
    inputs, (initial, *carried) = _split(operands)
    arguments = CallArguments._make(carried)
    bound: Bound = BoundStrategy.of(arguments.strategy)
    call, comm = bound.resolve_checked(
        inputs.q.device,
        partial(bound.strategy.resolve, bound.comm, arguments, inputs, initial),
        partial(_described, bound, arguments, inputs, initial is not None),
    )
    bound.announce("forward")
    comm = _prepared(comm, bound, arguments, call, inputs, "forward")
    with without_autocast(inputs.q):
        differentiated = any(x is not None and x.requires_grad for x in (*inputs, initial))
        upload_tables(bound.strategy, comm, call, inputs, differentiated)
        result = bound.strategy.forward(comm, call, _unit_strides(inputs), initial)
        return [*result, comm.numbers.as_tensor()]


@torch.library.register_fake("seqpar::linear_attention")  # type: ignore[untyped-decorator]
def _linear_attention_fake(*operands: Any) -> list[Tensor]:
    inputs, (_, *carried) = _split(operands)
    q, arguments = inputs.q, CallArguments._make(carried)
    counts = arguments.documents if arguments.return_state else 0, arguments.states_in
    dtype = accumulator_dtype(q.dtype)
    states = (q.new_empty((count, *inputs.state_shape), dtype=dtype) for count in counts)
    bound: Bound = BoundStrategy.of(arguments.strategy)
    numbers = empty_numbers(bound.comm.size)
    return [q.new_empty(inputs.out_shape), *states, numbers]


@implementation("seqpar::linear_attention_backward")
def _linear_attention_backward(
    dout: Tensor | None, dfinal: Tensor | None, *operands: Any
) -> list[Tensor]:
    inputs, (has_initial_state, entered, numbers, *carried) = _split(operands)
    arguments = CallArguments._make(carried)
    bound: Bound = BoundStrategy.of(arguments.strategy)
    if dout is None:
        dout = inputs.q.new_zeros(inputs.out_shape)
    dout = unit_stride(dout)
    if dfinal is None:
        documents = arguments.documents if arguments.return_state else 0
        dfinal = entered.new_zeros((documents, *entered.shape[1:]))
    bound.announce("backward")
    with without_autocast(inputs.q):
        comm = bound.comm.call(numbers)
        arguments = bound.strategy.with_backend(arguments, inputs)
        call = bound.strategy.to_call(comm, arguments, inputs, has_initial_state)
        comm = _prepared(comm, bound, arguments, call, inputs, "backward")
        gradients, dinitial = bound.strategy.backward(
            comm, call, _unit_strides(inputs), entered, dout, dfinal
        )
        pairs = zip(_differentiable(inputs), gradients, strict=True)
        wanted = [gradient for x, gradient in pairs if x is not None]
        return [x.contiguous() for x in (*wanted, dinitial) if x is not None]


@torch.library.register_fake("seqpar::linear_attention_backward")  # type: ignore[untyped-decorator]
def _linear_attention_backward_fake(_dout: object, _dfinal: object, *operands: Any) -> list[Tensor]:
    inputs, (has_initial_state, entered, _, *carried) = _split(operands)
    contiguous = torch.contiguous_format
    differentiable = (x for x in _differentiable(inputs) if x is not None)
    gradients = [torch.empty_like(x, memory_format=contiguous) for x in differentiable]
    if has_initial_state:
        documents = CallArguments._make(carried).documents
        gradients.append(entered.new_empty((documents, *entered.shape[1:])))
    return gradients


def _split(operands: Sequence[Any]) -> tuple[Inputs, Sequence[Any]]:
    """Return the inputs, with which operands begin, and the other operands."""
    return Inputs(*operands[:_FIELDS]), operands[_FIELDS:]


def _differentiable(inputs: Inputs) -> Inputs:
    """Return the inputs that have a gradient; a constant decay has none."""
    constant = inputs.log_decay is not None and inputs.log_decay.dim() == 1
    return inputs._replace(log_decay=None) if constant else inputs


def _unit_strides(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else unit_stride(x) for x in inputs))  # type: ignore[arg-type]


def _described(
    bound: Bound, arguments: CallArguments, inputs: Inputs, has_initial_state: bool, canonical: bool
) -> dict[str, object]:
    """Return everything that all ranks must share, by the names that users know."""
    g = inputs.log_decay
    described = bound.strategy.described() | OperandShape.of(*inputs[:3]).described()
    described |= {"heads of v": inputs.v.shape[2]} | arguments.shared(has_initial_state, canonical)
    return described | {"log_decay": None if g is None else g.tolist() if g.dim() == 1 else g.dim()}


def _prepared(
    comm: Comm,
    bound: Bound,
    arguments: CallArguments,
    call: ResolvedCall,
    inputs: Inputs,
    direction: str,
) -> Comm:
    """Return the Comm of a pass, routed; headers of its messages have a digest of the arguments."""
    has_initial_state = call.routes.has_initial_state
    if comm.has_headers(inputs.q.device):
        comm.digest = _digest(bound, arguments, call, inputs)
    describe = partial(_described, bound, arguments, inputs, has_initial_state, False)
    return bound.routed(comm, inputs.q.device, direction, describe)


def _digest(
    bound: Bound, arguments: CallArguments, call: ResolvedCall, inputs: Inputs
) -> CallDigest:
    _, k, v, log_decay, beta = inputs
    has_initial_state = call.routes.has_initial_state
    gates = [None if x is None else (x.dim(), x.dtype) for x in (log_decay, beta)]

    def described(canonical: bool) -> dict[str, object]:
        shared = bound.strategy.described() | arguments.shared(has_initial_state, canonical)
        return shared | {
            **call.shape.described(),
            "strategy": str(bound.strategy),
            "routing": str(bound.routing),
            "heads of k": k.shape[2],
            "heads of v": v.shape[2],
            "log_decay": str(gates[0]),
            "beta": str(gates[1]),
        }

    heads = k.shape[2], v.shape[2]
    key = "linear", call.shape, has_initial_state, *heads, *gates, *arguments.settings
    constant = None if log_decay is None or log_decay.dim() > 1 else log_decay
    return digest_of_call(call.layout, key, described).extended(log_decay=constant)


class _CallContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    settings: tuple[object, ...]
    has_initial_state: bool
    bound: Bound
    handles: Tensor


def _save_for_backward(ctx: _CallContext, operands: tuple[Any, ...], results: list[Tensor]) -> None:
    initial, *carried = operands[_FIELDS:]
    arguments = CallArguments._make(carried)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(results[3])
    ctx.settings = arguments.settings
    ctx.has_initial_state = initial is not None
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handles = arguments.layout  # hooks may copy saved tensors
    ctx.save_for_backward(arguments.layout, *operands[:_FIELDS], *results[2:])


def _differentiate(
    ctx: _CallContext, dout: Tensor | None, dfinal: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    layout, *inputs, entered, numbers = ctx.saved_tensors
    arguments = CallArguments._make((layout, *ctx.settings))
    operator = torch.ops.seqpar.linear_attention_backward
    operands = dout, dfinal, *inputs, ctx.has_initial_state, entered
    gradients = iter(in_order(numbers, lambda x: operator(*operands, x, *arguments)))
    has_gradient = [x is not None for x in _differentiable(Inputs(*inputs))]
    has_gradient.append(ctx.has_initial_state)
    return tuple(next(gradients) if some else None for some in has_gradient)


register_autograd("seqpar::linear_attention", _FIELDS + 1, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::linear_attention_backward", refuse_double_backward)
refuse_transforms("seqpar::linear_attention")


# These FLOPs are of the recurrent form, where every token costs the same: forward adds an outer
# product k·vᵀ (K × V) to the state and multiplies the state by q; backward repeats the first, has
# two products with gradients of out (for q and for states), and two with gradients of states (for k
# and for v). By the delta rule a token also
# reads the state with its key, which doubles the products of states. A multiplication and an
# addition are 2 FLOPs. The chunks in which kernels compute take more.
def _forward_flops(*operands: Any, out_val: object = None) -> int:
    outputs, states = _product_flops(_split(operands)[0])
    return outputs + states


def _backward_flops(_dout: object, _dfinal: object, *operands: Any, out_val: object = None) -> int:
    outputs, states = _product_flops(_split(operands)[0])
    return 2 * outputs + 3 * states


def _product_flops(inputs: Inputs) -> tuple[int, int]:
    """Return the FLOPs of forward's products for outputs, and of its products for states."""
    batch, rows, heads, value_dim = inputs.out_shape
    per_head = 2 * batch * rows * inputs.q.shape[3] * value_dim
    return per_head * heads, per_head * inputs.heads * (1 if inputs.beta is None else 2)


FLOP_FORMULAS[torch.ops.seqpar.linear_attention] = _forward_flops
FLOP_FORMULAS[torch.ops.seqpar.linear_attention_backward] = _backward_flops
