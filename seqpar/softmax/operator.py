"""The two operators that an attention call lowers to: one forward and one backward.

Communication is part of them, so torch.compile and checkpointing treat a call as a single operator.
A layout enters as a handle (`seqpar.layout.handle`), and a module as a string that is determined by
its configuration (`seqpar.comm.binding`). Neither specialises a compiled graph on a batch.

FLOPs, for torch's FlopCounterMode, are exact for the pairs that this rank computes. Forward
multiplies q by k, and the probabilities by v. Backward multiplies q by k again, and has four more
products. A multiplication with an addition is 2 FLOPs. Like torch, it does not count the softmax
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.attention.operands import OperandShape
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
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.header import empty_numbers
from seqpar.core.dtypes import accumulator_dtype
from seqpar.softmax.call import SCHEMA, CallArguments, Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import cast_each, sinks_gradient
from seqpar.softmax.rehearsal import upload_tables
from seqpar.softmax.resolution import describe, resolve_on_ranks, shared_values
from seqpar.softmax.strategy import ForwardResult, Strategy

# The results are out, lse, the call's numbers, the max logits if they were requested, and the
# strategy's residuals. The numbers (`seqpar.comm.messages.header`) are (ranks,), on the
# CPU: messages of a backward carry the numbers of its forward. `sink_inputs` has the forward's out
# and lse if there are sinks, because the gradient of the sinks needs both, and not all strategies
# have them in their residuals.
torch.library.define(
    "seqpar::attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {SCHEMA}) -> Tensor[] results",
)
torch.library.define(
    "seqpar::attention_backward",
    "(Tensor? dout, Tensor? dlse, Tensor? sinks, Tensor[] sink_inputs, Tensor[] residuals, "
    "Tensor numbers, "
    f"SymInt[] q_shape, SymInt[] k_shape, SymInt[] v_shape, {SCHEMA}) -> Tensor[] gradients",
)


def attention_op(operands: Operands, arguments: CallArguments) -> list[Tensor]:
    """Call the operator; below autograd, torch calls its implementation `_attention`."""
    results: list[Tensor] = torch.ops.seqpar.attention(*operands, *arguments)
    return results


@implementation("seqpar::attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object
) -> list[Tensor]:
    operands, arguments = Operands(q, k, v, sinks), CallArguments._make(carried)
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    call, comm = resolve_on_ranks(bound, arguments, operands)
    bound.announce("forward")
    shared = lambda: shared_values(call.shape, arguments, call.has_sinks)  # noqa: E731
    comm = bound.routed(comm, q.device, "forward", shared)
    with without_autocast(q):
        operands, call = prepare_forward(bound.strategy, comm, call, operands, arguments)
        return results_of(bound.strategy.forward(comm, call, operands), comm, call)


def prepare_forward(
    strategy: Strategy, comm: Comm, call: ResolvedCall, operands: Operands, arguments: CallArguments
) -> tuple[Operands, ResolvedCall]:
    """Return operands for kernels, and the call with a max-logit tracker, if one was requested."""
    q, k, v, sinks = operands
    operands = Operands(unit_stride(q), unit_stride(k), unit_stride(v), sinks)
    if arguments.return_max_logits:
        call = replace(call, max_logits=MaxLogits.nothing(q))
    upload_tables(strategy, comm, call, q.device, operands.differentiated)
    return operands, call


def results_of(result: ForwardResult, comm: Comm, call: ResolvedCall) -> list[Tensor]:
    """Return the operator's results; max logits are exchanged here."""
    max_logits = [] if call.max_logits is None else [call.max_logits.of_all_ranks(comm)]
    return [result.out, result.lse, comm.numbers.as_tensor(), *max_logits, *result.residuals]


@torch.library.register_fake("seqpar::attention")  # type: ignore[untyped-decorator]
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object
) -> list[Tensor]:
    return empty_results(q, k, v, CallArguments._make(carried))


def empty_results(q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments) -> list[Tensor]:
    """Return empty tensors like the operator's results, for torch.compile."""
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    residuals = bound.strategy.empty_residuals(
        bound.comm, q, k, v, arguments.tokens, arguments.kv_tokens
    )
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    numbers = empty_numbers(bound.comm.size)
    max_logits = [MaxLogits.nothing(q).values] if arguments.return_max_logits else []
    return [out, lse, numbers, *max_logits, *residuals]


@implementation("seqpar::attention_backward")
def _attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    sink_inputs: list[Tensor],
    residuals: list[Tensor],
    numbers: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    *carried: object,
) -> list[Tensor]:
    arguments, dtype = CallArguments._make(carried), residuals[0].dtype
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    if dout is None:
        dout = residuals[0].new_zeros((*q_shape[:-1], v_shape[-1]))
    dout = unit_stride(dout)
    shape = OperandShape.of_sizes(dtype, q_shape, k_shape, v_shape)
    bound.announce("backward")
    with without_autocast(dout):
        comm = bound.comm.call(numbers)
        has_sinks = sinks is not None
        call = arguments.to_call(comm, shape, has_sinks)
        describe(comm, bound, arguments, call, dout.device, sinks)
        comm = bound.routed(
            comm, dout.device, "backward", lambda: shared_values(shape, arguments, has_sinks)
        )
        residuals = [unit_stride(x) for x in residuals]
        gradients = bound.strategy.backward(comm, call, dout, dlse, sinks, residuals)
        cast = cast_each(gradients, dtype)
        if sinks is None:
            return cast
        out, lse = sink_inputs
        return [*cast, sinks_gradient(dout, out, lse, sinks)]


@torch.library.register_fake("seqpar::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    sink_inputs: list[Tensor],
    residuals: list[Tensor],
    numbers: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    *carried: object,
) -> list[Tensor]:
    gradients = [residuals[0].new_empty(shape) for shape in (q_shape, k_shape, v_shape)]
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


class CallContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor | None, ...]
    settings: tuple[object, ...]
    bound: BoundStrategy[Strategy]
    handles: tuple[Tensor | None, ...]


class _WholeCallContext(CallContext):
    shapes: tuple[torch.Size, torch.Size, torch.Size]


def _save_for_backward(
    ctx: _WholeCallContext, inputs: tuple[Any, ...], results: list[Tensor]
) -> None:
    q, k, v, sinks, *carried = inputs
    arguments = CallArguments._make(carried)
    out, lse, numbers, *residuals = save_call(ctx, arguments, results)
    ctx.shapes = q.shape, k.shape, v.shape
    sink_inputs = [] if sinks is None else [out, lse]
    if not residuals or ctx.bound.strategy.keeps_operands:
        residuals = [q, k, v, out, lse, *residuals]
    mark: Any = getattr(arguments.layout, "mark", None)  # which checkpoints compare
    saved = *arguments.tensors(), numbers, sinks, *sink_inputs, *residuals
    ctx.save_for_backward(mark, *saved)


def as_result(
    out: Tensor,
    lse: Tensor,
    arguments: CallArguments,
    heads: HeadPlacement,
    unbatched: bool,
    max_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Return the public result of a call: out, or a tuple of out and the other requested tensors.

    `max_logits` is ignored if it was not requested: it may then be a residual of the strategy.
    """
    results = [heads.restore(out[0] if unbatched else out, -2)]
    if arguments.return_lse:
        results.append(heads.restore(lse[0] if unbatched else lse, -1))
    if arguments.return_max_logits and max_logits is not None:
        results.append(heads.restore(max_logits, -1))
    return results[0] if len(results) == 1 else tuple(results)


def save_call(ctx: CallContext, arguments: CallArguments, results: list[Tensor]) -> list[Tensor]:
    """Keep the call for backward; return the operator's results without the max logits.

    Marks the max logits and the call's numbers as results without a gradient.
    """
    ctx.set_materialize_grads(False)
    ctx.settings = arguments.settings()
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handles = arguments.tensors()  # hooks may copy saved tensors
    if not arguments.return_max_logits:
        ctx.mark_non_differentiable(results[2])
        return results
    ctx.mark_non_differentiable(results[2], results[3])
    return [*results[:3], *results[4:]]


def _differentiate(
    ctx: _WholeCallContext, dout: Tensor | None, dlse: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    arguments, saved = CallArguments.restored(ctx.saved_tensors[1:], ctx.settings)
    numbers, sinks, *saved = saved
    sink_inputs, residuals = ([], saved) if sinks is None else (saved[:2], saved[2:])
    operator, operands = torch.ops.seqpar.attention_backward, (dout, dlse, sinks)
    gradients = in_order(
        numbers,
        lambda x: operator(*operands, sink_inputs, residuals, x, *ctx.shapes, *arguments),
    )
    return (*gradients, None) if sinks is None else tuple(gradients)


register_autograd("seqpar::attention", 4, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::attention_backward", refuse_double_backward)
refuse_transforms("seqpar::attention")


def forward_flops(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object, out_val: object = None
) -> int:
    shape = OperandShape.of(q, k, v)
    return 2 * _area(shape, carried, backward=False) * (shape.dim + shape.value_dim)


def _backward_flops(
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    sink_inputs: list[Tensor],
    residuals: list[Tensor],
    numbers: Tensor,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    *carried: object,
    out_val: object = None,
) -> int:
    shape = OperandShape.of_sizes(residuals[0].dtype, q_shape, k_shape, v_shape)
    return backward_flops(shape, carried)


def backward_flops(shape: OperandShape, carried: tuple[object, ...]) -> int:
    return 2 * _area(shape, carried, backward=True) * (3 * shape.dim + 2 * shape.value_dim)


def _area(shape: OperandShape, carried: tuple[object, ...], backward: bool) -> int:
    """Return the number of pairs that this rank computes, in all heads and batch entries."""
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    call = arguments.to_call(bound.comm, shape, has_sinks=False)
    areas = bound.strategy.backward_areas if backward else bound.strategy.areas
    return shape.batch * sum(areas(call, bound.comm.rank))


FLOP_FORMULAS[torch.ops.seqpar.attention] = forward_flops
FLOP_FORMULAS[torch.ops.seqpar.attention_backward] = _backward_flops
