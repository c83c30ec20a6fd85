"""The operators that a linear attention call lowers to: one forward and one backward.

They communicate too; `seqpar.softmax.operator` says why. States are (n, B, Hkv, D, Dv): here the
batch is the second dimension, unlike in the module's arguments. The results are out, the final
states, `entered`, which has the states that entered this rank's spans, and `numbers`, the call's,
(ranks,). `dfinal` has the gradients of the final states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape, digest_of_call
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
from seqpar.linear.states.call import SCHEMA, CallArguments, ResolvedCall, resolve
from seqpar.linear.states.strategy import LinearStrategy

torch.library.define(
    "seqpar::linear_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial, {SCHEMA})"
    " -> Tensor[] results",
)
torch.library.define(
    "seqpar::linear_attention_backward",
    "(Tensor? dout, Tensor? dfinal, Tensor q, Tensor k, Tensor v, Tensor? log_decay, "
    f"bool has_initial_state, Tensor entered, Tensor numbers, {SCHEMA}) -> Tensor[] gradients",
)


@implementation("seqpar::linear_attention")
def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    *carried: Any,
) -> list[Tensor]:
    arguments = CallArguments(*carried)
    bound: BoundStrategy[LinearStrategy] = BoundStrategy.of(arguments.strategy)
    call, comm = bound.resolve_checked(
        q.device,
        partial(resolve, bound.comm, arguments, q, k, v, log_decay, initial),
        lambda canonical: (
            {"transport": bound.strategy.transport}
            | OperandShape.of(q, k, v).described()
            | arguments.shared(log_decay, initial, canonical)
        ),
    )
    _describe(comm, bound, arguments, call, log_decay, initial is not None, q.device)
    bound.announce("forward")
    comm = bound.routed(
        comm,
        q.device,
        "forward",
        lambda: call.shape.described() | arguments.shared(None, initial, False),
    )
    with without_autocast(q):
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        result = bound.strategy.forward(comm, call, q, k, v, initial)
        return [*result, comm.numbers.as_tensor()]


def _describe(
    comm: Comm,
    bound: BoundStrategy[LinearStrategy],
    arguments: CallArguments,
    call: ResolvedCall,
    log_decay: Tensor | None,
    begun: bool,
    device: torch.device,
) -> None:
    """Have the headers of a call's messages carry a digest of its arguments."""
    if not comm.has_headers(device):
        return

    def described(canonical: bool) -> dict[str, Any]:
        shared = arguments.shared(None, None, canonical)
        return shared | {
            **call.shape.described(),
            "strategy": str(bound.strategy),
            "transport": bound.strategy.transport,
            "routing": str(bound.routing),
            "initial_state": begun,
            "log_decay": log_decay is not None,
        }

    key = "linear", call.shape, begun, log_decay is not None, *arguments.settings()
    digest = digest_of_call(call.layout, key, described)
    comm.digest = digest.extended(log_decay=log_decay)


@torch.library.register_fake("seqpar::linear_attention")  # type: ignore[untyped-decorator]
def _linear_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    *carried: Any,
) -> list[Tensor]:
    arguments = CallArguments(*carried)
    shape = q.shape[0], k.shape[2], q.shape[3], v.shape[3]
    counts = arguments.documents if arguments.return_state else 0, arguments.states_in
    dtype = accumulator_dtype(q.dtype)
    final_states, entered = (q.new_empty((count, *shape), dtype=dtype) for count in counts)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    bound: BoundStrategy[LinearStrategy] = BoundStrategy.of(arguments.strategy)
    numbers = empty_numbers(bound.comm.size)
    return [out, final_states, entered, numbers]


@implementation("seqpar::linear_attention_backward")
def _linear_attention_backward(
    dout: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    has_initial_state: bool,
    entered: Tensor,
    numbers: Tensor,
    *carried: Any,
) -> list[Tensor]:
    arguments = CallArguments(*carried)
    bound: BoundStrategy[LinearStrategy] = BoundStrategy.of(arguments.strategy)
    if dout is None:
        dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    dout = unit_stride(dout)
    if dfinal is None:
        documents = arguments.documents if arguments.return_state else 0
        dfinal = entered.new_zeros((documents, *entered.shape[1:]))
    shape = OperandShape.of(q, k, v)
    bound.announce("backward")
    with without_autocast(q):
        comm = bound.comm.call(numbers)
        call = arguments.to_call(comm, shape, has_initial_state, log_decay, q.device)
        _describe(comm, bound, arguments, call, log_decay, has_initial_state, q.device)
        comm = bound.routed(
            comm,
            q.device,
            "backward",
            lambda: (
                shape.described()
                | arguments.shared(None, None, False)
                | {"initial_state": has_initial_state}
            ),
        )
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        gradients = bound.strategy.backward(comm, call, q, k, v, entered, dout, dfinal)
        dq, dk, dv, *dinitial = gradients
        return [*(x.to(q.dtype) for x in (dq, dk, dv)), *dinitial]


@torch.library.register_fake("seqpar::linear_attention_backward")  # type: ignore[untyped-decorator]
def _linear_attention_backward_fake(
    dout: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    has_initial_state: bool,
    entered: Tensor,
    numbers: Tensor,
    *carried: Any,
) -> list[Tensor]:
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    if has_initial_state:
        documents = CallArguments(*carried).documents
        gradients.append(entered.new_empty((documents, *entered.shape[1:])))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    q, k, v, log_decay, initial, *carried = inputs
    arguments = CallArguments(*carried)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(results[3])
    ctx.settings = arguments.settings()
    ctx.has_initial_state = initial is not None
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handles = arguments.layout  # hooks may copy saved tensors
    ctx.save_for_backward(*arguments.tensors(), q, k, v, log_decay, *results[2:])


def _differentiate(
    ctx: Any, dout: Tensor | None, dfinal: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    layout, q, k, v, log_decay, entered, numbers = ctx.saved_tensors
    arguments = CallArguments(layout, *ctx.settings)
    dq, dk, dv, *dinitial = torch.ops.seqpar.linear_attention_backward(
        dout, dfinal, q, k, v, log_decay, ctx.has_initial_state, entered, numbers, *arguments
    )
    return dq, dk, dv, None, *(dinitial or [None])


register_autograd("seqpar::linear_attention", 5, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::linear_attention_backward", refuse_double_backward)
refuse_transforms("seqpar::linear_attention")
