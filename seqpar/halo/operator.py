"""The operators of a convolution over sharded tokens: one forward and one backward.

x is (B, T, C). The results are out, the `received` rows of other ranks (room, B, C), and the
`numbers` of the call (ranks,). Without a weight, a call shifts tokens. Backward is the same
convolution with windows that follow their token, and has the same bits under every layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.attention.operands import digest_of_call
from seqpar.attention.operators import (
    FLOP_FORMULAS,
    implementation,
    in_order,
    refuse_double_backward,
    refuse_transforms,
    register_autograd,
    without_autocast,
)
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.header import empty_numbers
from seqpar.core.dtypes import accumulator_dtype
from seqpar.halo.call import SCHEMA, CallArguments, Halo, check
from seqpar.halo.convolve import Taps, convolve, exchange, silu, silu_gradient, tap_gradients
from seqpar.layout.handle import from_handle

torch.library.define(
    "seqpar::causal_conv1d",
    f"(Tensor x, Tensor? weight, Tensor? bias, {SCHEMA}) -> Tensor[] results",
)
torch.library.define(
    "seqpar::causal_conv1d_backward",
    "(Tensor? dout, Tensor x, Tensor? weight, Tensor? bias, Tensor received, Tensor numbers, "
    f"{SCHEMA}) -> Tensor[] gradients",
)


@implementation("seqpar::causal_conv1d")
def _causal_conv1d(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *carried: object
) -> list[Tensor]:
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Halo] = BoundStrategy.of(arguments.strategy)
    _, comm = bound.resolve_checked(
        x.device,
        partial(check, bound.comm, arguments, x, weight, bias),
        lambda canonical: arguments.shared(x, weight, bias, canonical),
    )
    _describe(comm, arguments, x, weight, bias)
    bound.announce("forward")
    with without_autocast(x):
        out, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.transpose(0, 1)
        halo = arguments.tables(comm.rank, x.device, following=False)
        wait = exchange(comm, rows, halo, arguments.room, f"{_name(weight)} forward")
        taps = Taps.of(weight, arguments.reach, following=False, bias=bias)
        finish = silu if arguments.activation else None
        received = convolve(out.transpose(0, 1), rows, taps, halo, wait, finish)
        return [out, received, comm.numbers.as_tensor()]


def _describe(
    comm: Comm, arguments: CallArguments, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Set the digest of a call's arguments that the headers of its messages carry."""
    if not comm.has_headers(x.device):
        return
    shape = x.dtype, x.shape[0], x.shape[2]
    key = "halo", shape, weight is not None, bias is not None, *arguments[1:]
    comm.digest = digest_of_call(
        from_handle(arguments.layout),
        key,
        lambda canonical: arguments.shared(x, weight, bias, canonical),
    )


@torch.library.register_fake("seqpar::causal_conv1d")  # type: ignore[untyped-decorator]
def _causal_conv1d_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *carried: object
) -> list[Tensor]:
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Halo] = BoundStrategy.of(arguments.strategy)
    numbers = empty_numbers(bound.comm.size)
    received = x.new_empty((arguments.room, x.shape[0], x.shape[2]))
    return [torch.empty_like(x, memory_format=torch.contiguous_format), received, numbers]


@implementation("seqpar::causal_conv1d_backward")
def _causal_conv1d_backward(dout: Tensor | None, *operands: Any) -> list[Tensor]:
    x, weight, bias, received, numbers, *carried = operands
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Halo] = BoundStrategy.of(arguments.strategy)
    bound.announce("backward")
    comm, reach = bound.comm.call(numbers), arguments.reach
    _describe(comm, arguments, x, weight, bias)
    with without_autocast(x):
        dx, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.transpose(0, 1)
        d = torch.zeros_like(rows) if dout is None else dout.transpose(0, 1)
        halo = arguments.tables(comm.rank, x.device, following=False)
        if arguments.activation:
            of_sums = rows.new_empty(rows.shape, dtype=accumulator_dtype(x.dtype))
            taps = Taps.of(weight, reach, following=False, bias=bias)
            convolve(of_sums, rows, taps, halo, lambda: received, silu_gradient, d)
            d = of_sums
        following = arguments.tables(comm.rank, x.device, following=True)
        wait = exchange(comm, d, following, following.received, f"{_name(weight)} backward")
        gradients = [dx]
        if weight is not None:
            dweight, dbias = tap_gradients(d, rows, halo, received, reach)
            gradients.append(dweight.to(weight.dtype).contiguous())
            if bias is not None:
                gradients.append(dbias.to(bias.dtype))
        taps = Taps.of(weight, reach, following=True)
        convolve(dx.transpose(0, 1), d, taps, following, wait)
        return gradients


@torch.library.register_fake("seqpar::causal_conv1d_backward")  # type: ignore[untyped-decorator]
def _causal_conv1d_backward_fake(_dout: object, *operands: Any) -> list[Tensor]:
    tensors = (x for x in operands[:3] if x is not None)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _name(weight: Tensor | None) -> str:
    """Return the function that users called; gloo's headers reveal ranks that called the other."""
    return Halo.name if weight is not None else "token_shift"


class _CallContext(FunctionCtx):
    saved_tensors: tuple[Tensor | None, ...]
    settings: tuple[object, ...]
    bound: BoundStrategy[Halo]
    handle: Tensor


def _save_for_backward(ctx: _CallContext, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    x, weight, bias, *carried = inputs
    arguments = CallArguments._make(carried)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(results[2])
    ctx.settings = arguments[1:]
    ctx.bound = BoundStrategy.of(arguments.strategy)  # kept alive until backward, with its key
    ctx.handle = arguments.layout  # hooks may copy saved tensors
    ctx.save_for_backward(arguments.layout, x, weight, bias, *results[1:])


def _differentiate(ctx: _CallContext, dout: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    layout, *tensors, numbers = ctx.saved_tensors
    operator = torch.ops.seqpar.causal_conv1d_backward
    gradients = in_order(numbers, lambda x: operator(dout, *tensors, x, layout, *ctx.settings))
    return *gradients, *[None] * (3 - len(gradients))


register_autograd("seqpar::causal_conv1d", 3, _differentiate, _save_for_backward)
torch.library.register_autograd("seqpar::causal_conv1d_backward", refuse_double_backward)
refuse_transforms("seqpar::causal_conv1d")


def _forward_flops(x: Tensor, weight: Tensor | None, *_: object, out_val: object = None) -> int:
    return 0 if weight is None else 2 * x.numel() * weight.shape[1]


def _backward_flops(_dout: object, *operands: Any, out_val: object = None) -> int:
    """Count the gradients of x and of the taps, but not recomputed sums."""
    return 2 * _forward_flops(*operands)


FLOP_FORMULAS[torch.ops.seqpar.causal_conv1d] = _forward_flops
FLOP_FORMULAS[torch.ops.seqpar.causal_conv1d_backward] = _backward_flops
