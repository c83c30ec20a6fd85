"""Divide a call of attention into two parts: `begin` posts messages, `finish` computes attention.

Between the two parts, while messages are sent, a model can compute another batch. The two parts are
two operators of torch, `attention_begin` and `attention_finish`. In backward, the derivative of
`attention_finish` posts messages, and the derivative of `attention_begin` computes gradients.

A call that has begun is stored in this process, under a number. The first operator returns a
*ticket*, an empty tensor whose shape contains the number, and the second operator takes the ticket.
The number is in the shape, because reading it from the data would require a copy from the device.
The gradient of a ticket has the same number.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import (
    FLOP_FORMULAS,
    CallContext,
    Saved,
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
from seqpar.comm.messages.comm import Comm
from seqpar.comm.messages.message_header import empty_numbers
from seqpar.core.arguments import shown
from seqpar.layout.layout import Layout
from seqpar.softmax.call import CallArguments, Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, cast_each, sinks_gradient
from seqpar.softmax.module import Attention
from seqpar.softmax.softmax_operator import ATTENTION, Bound, as_result
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy

P = TypeVar("P")  # the messages of a forward that has begun
G = TypeVar("G")  # the messages of a backward that has begun


@dataclass(frozen=True)
class SplitStrategy(Strategy, Generic[P, G]):
    """A strategy that can post the messages of a call before it waits for any message.

    `post` posts all messages that do not depend on received messages. `complete` waits for messages
    and computes attention.
    """

    keeps_operands: ClassVar[bool] = True

    def post(self, comm: Comm, call: ResolvedCall, operands: Operands) -> P:
        raise NotImplementedError

    def complete(self, posted: P, call: ResolvedCall, operands: Operands) -> ForwardResult:
        raise NotImplementedError

    def cancel(self, posted: P) -> bool:
        """Cancel the messages of a forward that will never be completed, if possible.

        Return whether the messages were cancelled. Messages between ranks cannot be cancelled,
        because the other ranks have posted them, too.
        """
        return False

    def post_gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
        at_once: bool,
    ) -> G:
        """Post the messages of a backward.

        Args:
            comm, call, operands: as in forward.
            output: the output of this rank's queries, and the gradient of this output.
            residuals: the tensors that forward kept for backward.
            at_once: whether the caller does other work before it calls `complete_gradients`. With
                True, further messages are posted now, so that they are sent during the other work.
                With False, `complete_gradients` posts the further messages.
        """
        raise NotImplementedError

    def complete_gradients(
        self,
        posted: G,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> Gradients:
        raise NotImplementedError

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        return self.complete(self.post(comm, call, operands), call, operands)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        sinks: Tensor | None,
        residuals: list[Tensor],
    ) -> Gradients:
        q, k, v, out, lse, *kept = residuals
        output = OutputGradient.of(dout, dlse, out, lse, sinks)
        return self.gradients(comm, call, output, Operands(q, k, v, sinks), kept)

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: Sequence[Tensor] = (),
    ) -> Gradients:
        residuals = list(residuals)
        posted = self.post_gradients(comm, call, output, operands, residuals, at_once=False)
        return self.complete_gradients(posted, call, output, operands, residuals)


_OPERANDS, _ARGUMENTS = "Tensor q, Tensor k, Tensor v", ATTENTION.arguments.schema
torch.library.define(
    "seqpar::attention_begin",
    f"({_OPERANDS}, Tensor? sinks, {_ARGUMENTS}) -> Tensor[] results",
)
torch.library.define(
    "seqpar::attention_begin_backward",
    f"(Tensor dticket, {_OPERANDS}, Tensor layout) -> Tensor[] gradients",
)
torch.library.define(
    "seqpar::attention_finish",
    f"(Tensor ticket, Tensor? sinks, {_OPERANDS}, {_ARGUMENTS}) -> Tensor[] results",
)
torch.library.define(
    "seqpar::attention_finish_backward",
    "(SymInt number, Tensor? dout, Tensor? dlse, Tensor? sinks, Tensor[] saved, Tensor numbers, "
    f"{_ARGUMENTS}) -> Tensor[] gradients",
)
_restored = ATTENTION.arguments.restored


class _Posted(NamedTuple):
    bound: BoundStrategy[SplitStrategy[object, object]]
    comm: Comm
    call: ResolvedCall
    messages: object
    operands: Operands
    output: OutputGradient | None = None  # only in backward
    residuals: tuple[Tensor, ...] = ()


_posted: dict[tuple[str, int], _Posted] = {}
_numbers = count(2)  # torch.compile may take sizes of 0 and 1 for constants


@implementation("seqpar::attention_begin")
def _begin(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object) -> list[Tensor]:
    operands, arguments = Operands(q, k, v, sinks), _restored(carried)
    bound: BoundStrategy[SplitStrategy[object, object]] = BoundStrategy.of(arguments.strategy)
    call, comm = ATTENTION.begin(bound, operands, arguments)
    bound.announce("forward")
    with without_autocast(q):
        operands, call = ATTENTION.prepared(bound.strategy, comm, call, operands, arguments)
        messages = bound.strategy.post(comm, call, operands)
    number = next(_numbers)
    _posted["forward", number] = _Posted(bound, comm, call, messages, operands)
    ticket = q.new_empty((0, number))
    # If a checkpoint repeats only the first part, `_finish` never takes this ticket. The call is
    # then dropped with the last reference to the ticket.
    weakref.finalize(ticket, _drop, number).atexit = False
    return [ticket]


def _drop(number: int) -> None:
    posted = _posted.get(("forward", number))
    if posted is not None and posted.bound.strategy.cancel(posted.messages):
        del _posted["forward", number]


@torch.library.register_fake("seqpar::attention_begin")  # type: ignore[untyped-decorator]
def _begin_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object
) -> list[Tensor]:
    return [q.new_empty((0, torch.library.get_ctx().new_dynamic_size()))]


@implementation("seqpar::attention_finish")
def _finish(
    ticket: Tensor, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *carried: object
) -> list[Tensor]:
    posted = _take("forward", ticket)
    posted.bound.announce("forward")
    with without_autocast(q):
        result = posted.bound.strategy.complete(posted.messages, posted.call, posted.operands)
        outs, kept = ATTENTION.results(result, posted.comm, posted.call)
        return [*outs, posted.comm.numbers.as_tensor(), *kept]


@torch.library.register_fake("seqpar::attention_finish")  # type: ignore[untyped-decorator]
def _finish_fake(
    ticket: Tensor, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *carried: object
) -> list[Tensor]:
    arguments = _restored(carried)
    bound: Bound = BoundStrategy.of(arguments.strategy)
    outs, kept = ATTENTION.empty(bound, Operands(q, k, v, sinks), arguments)
    return [*outs, empty_numbers(bound.comm.size), *kept]


@implementation("seqpar::attention_finish_backward")
def _finish_backward(
    number: int,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    saved: list[Tensor],
    numbers: Tensor,
    *carried: object,
) -> list[Tensor]:
    q, k, v, out, lse, *residuals = (unit_stride(x) for x in saved)
    arguments, dout = _restored(carried), torch.zeros_like(out) if dout is None else dout
    bound: BoundStrategy[SplitStrategy[object, object]] = BoundStrategy.of(arguments.strategy)
    bound.announce("backward")
    with without_autocast(q):
        comm = bound.comm.call(numbers)
        operands = Operands(q, k, v, sinks)
        shape = OperandShape.of(q, k, v)
        call = arguments.to_call(comm, shape, sinks is not None, q.device)
        compared = ATTENTION.compared(operands, arguments)
        ATTENTION.describe(bound, comm, call, arguments, q.device, compared)
        output = OutputGradient.of(unit_stride(dout), dlse, out, lse, sinks)
        messages = bound.strategy.post_gradients(
            comm, call, output, operands, residuals, at_once=True
        )
        _posted["backward", number] = _Posted(
            bound, comm, call, messages, operands, output, tuple(residuals)
        )
        gradients = [q.new_empty((0, number))]
        if sinks is not None:
            gradients.append(sinks_gradient(dout, out, lse, sinks))
        return gradients


@torch.library.register_fake("seqpar::attention_finish_backward")  # type: ignore[untyped-decorator]
def _finish_backward_fake(
    number: int,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    saved: list[Tensor],
    *_: object,
) -> list[Tensor]:
    gradients = [saved[0].new_empty((0, number))]
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


@implementation("seqpar::attention_begin_backward")
def _begin_backward(
    dticket: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Tensor
) -> list[Tensor]:
    posted = _take("backward", dticket)
    posted.bound.announce("backward")
    assert posted.output is not None
    with without_autocast(q):
        gradients = posted.bound.strategy.complete_gradients(
            posted.messages, posted.call, posted.output, posted.operands, list(posted.residuals)
        )
        del posted
        return cast_each(gradients, q.dtype)


@torch.library.register_fake("seqpar::attention_begin_backward")  # type: ignore[untyped-decorator]
def _begin_backward_fake(
    dticket: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Tensor
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def _take(direction: str, ticket: Tensor) -> _Posted:
    posted = _posted.pop((direction, ticket.shape[1]), None)
    if posted is None:
        raise RuntimeError("attention that has begun must be finished just once, where it began")
    return posted


class _BegunContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _FinishedContext(CallContext):
    number: int
    has_sinks: bool


def _save_begun(ctx: _BegunContext, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], _restored(inputs[4:]).layout)


def _differentiate_begin(ctx: _BegunContext, dticket: Tensor | None) -> tuple[Tensor | None, ...]:
    if dticket is None:
        return None, None, None, None
    *operands, layout = ctx.saved_tensors
    operator = torch.ops.seqpar.attention_begin_backward
    gradients = in_order(layout, lambda x: operator(dticket, *operands, x))
    return (*gradients, None)


def _save_finished(ctx: _FinishedContext, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    ticket, sinks, q, k, v, *carried = inputs
    arguments = _restored(carried)
    out, lse, numbers, *kept = results
    ctx.mark_non_differentiable(numbers, *kept)
    # The ticket itself is not stored, because the new ticket has a different number if a checkpoint
    # repeats the call.
    ctx.number, ctx.has_sinks = ticket.shape[1], sinks is not None
    residuals = kept[arguments.return_max_logits :]
    handles = ATTENTION.keep_call(ctx, BoundStrategy.of(arguments.strategy), carried)
    ctx.save_for_backward(*handles, numbers, sinks, q, k, v, out, lse, *residuals)


def _differentiate_finish(
    ctx: _FinishedContext, dout: Tensor | None, dlse: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    arguments, (numbers, sinks, *saved) = ATTENTION.kept_call(ctx)
    operator = torch.ops.seqpar.attention_finish_backward
    gradients = in_order(
        numbers, lambda x: operator(ctx.number, dout, dlse, sinks, saved, x, *arguments)
    )
    return tuple(gradients) if ctx.has_sinks else (*gradients, None)


register_autograd("seqpar::attention_begin", 4, _differentiate_begin, _save_begun)
register_autograd("seqpar::attention_finish", 2, _differentiate_finish, _save_finished, 5)
for operator in ("attention_begin", "attention_finish"):
    torch.library.register_autograd(f"seqpar::{operator}_backward", refuse_double_backward)
    refuse_transforms(f"seqpar::{operator}")


def _finish_flops(
    ticket: Tensor,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *carried: object,
    out_val: object = None,
) -> int:
    return ATTENTION.flops(Operands(q, k, v, sinks), _restored(carried))


def _finish_backward_flops(
    number: int,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    saved: list[Tensor],
    numbers: Tensor,
    *carried: object,
    out_val: object = None,
) -> int:
    """Count the FLOPs of both parts of a backward in the first part.

    The second part has no layout, so it cannot count them.
    """
    sizes = [size for x in saved[:3] for size in x.shape]
    return ATTENTION.backward_flops(_restored(carried), Saved(saved, sizes))


FLOP_FORMULAS[torch.ops.seqpar.attention_finish] = _finish_flops
FLOP_FORMULAS[torch.ops.seqpar.attention_finish_backward] = _finish_backward_flops


class BegunCall(NamedTuple):
    """A call whose messages were posted. Pass this object to the `finish` method of the module."""

    ticket: Tensor
    operands: Operands
    arguments: CallArguments
    heads: HeadPlacement
    unbatched: bool


class SplitAttention(Attention):
    """Attention whose calls can be made in two parts, with other work between the parts.

    While the messages of one call are sent, the model can compute another batch. For example, a
    micro-batch can be cut into two *nano-batches*, and the model can compute one nano-batch while
    the messages of the other nano-batch are sent. `forward` runs the second part directly after the
    first part.
    """

    def begin(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> BegunCall:
        """Post the messages of a call and return immediately.

        Arguments and errors are the same as in a call. Pass the result to `finish` once. If a call
        on a group is never finished, its tensors stay in memory. Do not change q, k and v in place
        before `finish`. All ranks must begin and finish their calls in the same order. A function
        that is checkpointed with torch.utils.checkpoint must contain both `begin` and `finish` of a
        call, or neither of them, because backward repeats the whole function.

        Autograd first runs the backward of `finish`, which posts messages. After that, autograd
        runs the backward of `begin`, which computes gradients. Other work of the model can run
        between the two backwards.
        """
        operands, arguments, heads = self._agreed_inputs(q, k, v, layout, **options)
        carried = ATTENTION.arguments.flat(arguments)
        (ticket,) = torch.ops.seqpar.attention_begin(*operands, *carried)
        return BegunCall(ticket, operands, arguments, heads, q.dim() == 3)

    def finish(self, begun: BegunCall) -> Tensor | tuple[Tensor, ...]:
        """Return the result of a call that has begun: out, or a tuple that begins with out."""
        if not isinstance(begun, BegunCall):
            raise ValueError(f"begun must be what begin returned, got {shown(begun)}")
        q, k, v, sinks = begun.operands
        carried = ATTENTION.arguments.flat(begun.arguments)
        results = torch.ops.seqpar.attention_finish(begun.ticket, sinks, q, k, v, *carried)
        return as_result(results, begun.arguments, begun.heads, begun.unbatched)
