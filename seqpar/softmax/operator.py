"""The operators that an attention call lowers to: one forward and one backward.

They communicate too, so that torch.compile and checkpointing see a call as a single operator. A
layout enters as a handle (`seqpar.layout.handle`), and a module as a string that its configuration
determines (`seqpar.comm.binding`): neither specialises a compiled graph on a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.binding import BoundStrategy
from seqpar.dtypes import accumulator_dtype
from seqpar.operands import OperandShape
from seqpar.operators import (
    refuse_double_backward,
    refuse_transforms,
    register_autograd,
    unit_stride,
    without_autocast,
)
from seqpar.softmax.call import SCHEMA, CallArguments, resolve
from seqpar.softmax.partial import cast_each, sinks_gradient
from seqpar.softmax.strategy import Strategy, agreed

# The results are out, lse, the call's numbers and the strategy's residuals. The numbers are
# (ranks,), int64 and on the CPU: a backward's messages have the numbers of its forward.
# `sink_inputs` has the forward's out and lse if there are sinks, whose gradient needs both. The
# residuals have them only for some strategies.
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


@torch.library.impl("seqpar::attention", ("cpu", "cuda"))
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: Any
) -> list[Tensor]:
    arguments = CallArguments(*carried)
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    call, comm = bound.resolve_checked(
        q.device,
        partial(resolve, bound.comm, arguments, q, k, v, sinks),
        partial(agreed, bound, arguments, q, k, v, sinks),
    )
    bound.announce("forward")
    comm = bound.routed(
        comm,
        q.device,
        "forward",
        lambda: call.shape.described() | arguments.shared(sinks, False),
    )
    with without_autocast(q):
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        result = bound.strategy.forward(comm, call, q, k, v)
        return [result.out, result.lse, comm.numbers.as_tensor(), *result.residuals]


@torch.library.register_fake("seqpar::attention")  # type: ignore[untyped-decorator]
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: Any
) -> list[Tensor]:
    return empty_results(q, k, v, CallArguments(*carried))


def empty_results(q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments) -> list[Tensor]:
    """Return empty tensors like an operator's results, with which torch.compile traces."""
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    residuals = bound.strategy.empty_residuals(
        bound.comm, q, k, v, arguments.tokens, arguments.kv_tokens
    )
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    numbers = torch.empty(bound.comm.size, dtype=torch.int64, device="cpu")
    return [out, lse, numbers, *residuals]


@torch.library.impl("seqpar::attention_backward", ("cpu", "cuda"))
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
    *carried: Any,
) -> list[Tensor]:
    arguments, dtype = CallArguments(*carried), residuals[0].dtype
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    if dout is None:
        dout = residuals[0].new_zeros((*q_shape[:-1], v_shape[-1]))
    dout = unit_stride(dout)
    batch, _, heads, dim = q_shape
    shape = OperandShape(dtype, batch, heads, k_shape[2], dim, v_shape[3])
    bound.announce("backward")
    with without_autocast(dout):
        comm = bound.comm.call(numbers)
        call = arguments.to_call(comm, shape, sinks)
        comm = bound.routed(
            comm,
            dout.device,
            "backward",
            lambda: shape.described() | arguments.shared(sinks, False),
        )
        residuals = [unit_stride(x) for x in residuals]
        cast = cast_each(bound.strategy.backward(comm, call, dout, dlse, residuals), dtype)
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
    *carried: Any,
) -> list[Tensor]:
    gradients = [residuals[0].new_empty(shape) for shape in (q_shape, k_shape, v_shape)]
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    q, k, v, sinks, *carried = inputs
    out, lse, numbers, *residuals = results
    arguments = CallArguments(*carried)
    ctx.set_materialize_grads(False)
    ctx.shapes = q.shape, k.shape, v.shape
    ctx.settings = arguments.settings()
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handles = arguments.layout, arguments.kv_layout  # hooks may copy saved tensors
    sink_inputs = [] if sinks is None else [out, lse]
    if not residuals or ctx.bound.strategy.keeps_beside:
        residuals = [q, k, v, out, lse, *residuals]
    ctx.save_for_backward(*arguments.tensors(), numbers, sinks, *sink_inputs, *residuals)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    layout, kv_layout, prefix_lens, numbers, sinks, *saved = ctx.saved_tensors
    sink_inputs, residuals = ([], saved) if sinks is None else (saved[:2], saved[2:])
    arguments = CallArguments(layout, kv_layout, prefix_lens, *ctx.settings)
    gradients = torch.ops.seqpar.attention_backward(
        dout, dlse, sinks, sink_inputs, residuals, numbers, *ctx.shapes, *arguments
    )
    return (*gradients, None) if sinks is None else tuple(gradients)


register_autograd("seqpar::attention", 4, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::attention_backward", refuse_double_backward)
refuse_transforms("seqpar::attention")
