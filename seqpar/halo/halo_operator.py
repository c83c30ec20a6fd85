"""The torch operators of a convolution over sharded tokens, with the arguments of a call and the
checks of these arguments.

x is (B, T, C), for batch, tokens and channels. `received` (room, B, C) has the rows of other ranks,
and is kept for backward. A call without a weight shifts tokens by one. Backward is a convolution
over each row and the tokens after it. Its results have the same bits in every layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.call_arguments import Count
from seqpar.attention.operands import check_ranks_of, naming_rank
from seqpar.attention.operators import CallOperator, Compared, Results, Saved
from seqpar.comm.agreement import Described
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.halo.convolve import Taps, convolve, exchange, silu, silu_gradient, tap_gradients
from seqpar.halo.rows import HaloRows, halo_rows
from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import described, from_handle


@dataclass(frozen=True)
class Halo:
    """The strategy of convolutions over sharded tokens. It has no options."""

    name: ClassVar[str] = "causal_conv1d"
    routable: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name


class ConvolutionTensors(NamedTuple):
    x: Tensor  # (B, T, C)
    weight: Tensor | None  # (C, reach + 1); None means a shift
    bias: Tensor | None  # (C,)


class ConvolutionArguments(NamedTuple):
    layout: Tensor  # a geometry's handle
    room: Count  # the number of rows to receive
    strategy: str  # the key of a BoundStrategy
    reach: int
    activation: str


class Convolution(NamedTuple):
    """A call whose arguments have been checked."""

    layout: Geometry
    dtype: torch.dtype
    batch: int
    channels: int
    has_weight: bool
    has_bias: bool
    reach: int
    activation: str
    room: int

    @classmethod
    def of(cls, tensors: ConvolutionTensors, arguments: ConvolutionArguments) -> Convolution:
        x, weight, bias = tensors
        form = x.dtype, x.shape[0], x.shape[2], weight is not None, bias is not None
        layout, room, _, reach, activation = arguments
        return cls(from_handle(layout), *form, reach, activation, room)

    @property
    def label(self) -> str:
        """The name of the function that the user called.

        The name is in the headers of messages, which ranks compare.
        """
        return Halo.name if self.has_weight else "token_shift"

    def rows(self, rank: int, device: torch.device, following: bool) -> HaloRows:
        """Return the rows that a rank sends and receives in forward, or in backward if `following`
        is True.
        """
        return halo_rows(self.layout, rank, self.reach, following, device)


class ConvolutionOperator(CallOperator[ConvolutionTensors, ConvolutionArguments, Convolution]):
    name = "causal_conv1d"
    outs = 1

    def __init__(self) -> None:
        super().__init__(ConvolutionTensors, ConvolutionArguments)

    def resolve(
        self,
        bound: BoundStrategy[Halo],
        tensors: ConvolutionTensors,
        arguments: ConvolutionArguments,
    ) -> Convolution:
        with naming_rank(bound.comm):
            bound.comm.check_device("x", tensors.x.device)
            call = Convolution.of(tensors, arguments)
            check_ranks_of(bound.comm, layout=call.layout)
            _check_tensors(call, bound.comm.rank, tensors)
        return call

    def agreed(
        self,
        bound: BoundStrategy[Halo],
        call: Convolution,
        arguments: ConvolutionArguments,
        exact: bool,
    ) -> Described:
        return {
            "layout": described(arguments.layout, exact),
            "dtype": str(call.dtype),
            "batch size": call.batch,
            "channels": call.channels,
            "width": call.reach + 1,
            "weight": call.has_weight,
            "bias": call.has_bias,
            "activation": call.activation,
        }

    def key(self, call: Convolution, arguments: ConvolutionArguments) -> Hashable:
        return call[1:]

    def forward(
        self,
        strategy: Halo,
        comm: Comm,
        call: Convolution,
        tensors: ConvolutionTensors,
        arguments: ConvolutionArguments,
    ) -> Results:
        x, weight, bias = tensors
        out, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.transpose(0, 1)
        halo = call.rows(comm.rank, x.device, following=False)
        wait = exchange(comm, rows, halo, call.room, f"{call.label} forward")
        taps = Taps.of(weight, call.reach, following=False, bias=bias)
        finish = silu if call.activation else None
        received = convolve(out.transpose(0, 1), rows, taps, halo, wait, finish)
        return Results([out], [received])

    def empty(
        self,
        bound: BoundStrategy[Halo],
        tensors: ConvolutionTensors,
        arguments: ConvolutionArguments,
    ) -> Results:
        x = tensors.x
        received = x.new_empty((arguments.room, x.shape[0], x.shape[2]))
        return Results([torch.empty_like(x, memory_format=torch.contiguous_format)], [received])

    def save(
        self,
        bound: BoundStrategy[Halo],
        tensors: ConvolutionTensors,
        arguments: ConvolutionArguments,
        outs: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> Saved:
        return Saved([*tensors, *kept], [])

    def resolve_again(
        self,
        bound: BoundStrategy[Halo],
        comm: Comm,
        arguments: ConvolutionArguments,
        saved: Saved,
    ) -> tuple[Convolution, Compared]:
        return Convolution.of(_saved_tensors(saved), arguments), {}

    def backward(
        self,
        strategy: Halo,
        comm: Comm,
        call: Convolution,
        gradients: Sequence[Tensor | None],
        saved: Saved,
    ) -> list[Tensor]:
        (x, weight, bias), received = _saved_tensors(saved), saved.tensors[3]
        (dout,), reach = gradients, call.reach
        assert received is not None
        dx, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.transpose(0, 1)
        d = torch.zeros_like(rows) if dout is None else dout.transpose(0, 1)
        halo = call.rows(comm.rank, x.device, following=False)
        if call.activation:
            of_sums = rows.new_empty(rows.shape, dtype=accumulator_dtype(x.dtype))
            taps = Taps.of(weight, reach, following=False, bias=bias)
            convolve(of_sums, rows, taps, halo, lambda: received, silu_gradient, d)
            d = of_sums
        following = call.rows(comm.rank, x.device, following=True)
        wait = exchange(comm, d, following, following.received, f"{call.label} backward")
        found = [dx]
        if weight is not None:
            dweight, dbias = tap_gradients(d, rows, halo, received, reach)
            found.append(dweight.to(weight.dtype).contiguous())
            if bias is not None:
                found.append(dbias.to(bias.dtype))
        taps = Taps.of(weight, reach, following=True)
        convolve(dx.transpose(0, 1), d, taps, following, wait)
        return found

    def empty_gradients(self, arguments: ConvolutionArguments, saved: Saved) -> list[Tensor]:
        tensors = (x for x in saved.tensors[:3] if x is not None)
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]

    def flops(self, tensors: ConvolutionTensors, arguments: ConvolutionArguments) -> int:
        return 0 if tensors.weight is None else 2 * tensors.x.numel() * tensors.weight.shape[1]

    def backward_flops(self, arguments: ConvolutionArguments, saved: Saved) -> int:
        """Return the FLOPs for the gradients of x and of the taps.

        FLOPs for computing results of forward again are not counted.
        """
        return 2 * self.flops(_saved_tensors(saved), arguments)


CONVOLUTION = ConvolutionOperator().registered()


def _saved_tensors(saved: Saved) -> ConvolutionTensors:
    x, weight, bias = saved.tensors[:3]
    assert x is not None
    return ConvolutionTensors(x, weight, bias)


def _check_tensors(call: Convolution, rank: int, tensors: ConvolutionTensors) -> None:
    x, *others = tensors
    tokens = call.layout.holdings[rank].tokens
    if x.shape[1] != tokens:
        wanted = f"the {tokens} tokens its layout gives this rank"
        raise ValueError(f"x must have {wanted}, got {x.shape[1]}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be of one of {DTYPES}, got {x.dtype}")
    dtypes = x.dtype, accumulator_dtype(x.dtype)
    shapes = (x.shape[2], call.reach + 1), (x.shape[2],)
    for name, other, shape in zip(("weight", "bias"), others, shapes, strict=True):
        if other is not None and (tuple(other.shape) != shape or other.dtype not in dtypes):
            wanted = f"{shape} of {' or '.join(map(str, dict.fromkeys(dtypes)))}"
            raise ValueError(f"{name} must be {wanted}, got {tuple(other.shape)} of {other.dtype}")
