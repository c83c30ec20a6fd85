"""The arguments of a convolution over sharded tokens, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.operands import check_ranks_of, naming_rank
from seqpar.attention.operators import Count, schema_of
from seqpar.comm.dtensor import is_dtensor
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import check_tensor, shown
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.core.traffic import Traffic, summed
from seqpar.halo.rows import HaloRows, halo_rows, sent_rows
from seqpar.layout.handle import from_handle, name_of, sizes_of
from seqpar.layout.layout import Layout

ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


@dataclass(frozen=True)
class Halo:
    """The operator's strategy, for `BoundStrategy`. It has no options."""

    name: ClassVar[str] = "causal_conv1d"
    routable: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name


class CallArguments(NamedTuple):
    """A call's arguments, except for its operands, as the operator carries them."""

    layout: Tensor  # a geometry's handle
    room: Count  # the number of rows to receive
    strategy: str  # the key of a BoundStrategy
    reach: int
    activation: str

    def tables(self, rank: int, device: torch.device, following: bool) -> HaloRows:
        """Return a rank's rows in forward, or in backward, which needs `following` rows."""
        return halo_rows(from_handle(self.layout), rank, self.reach, following, device)

    def shared(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, canonical: bool
    ) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks, by names that users know."""
        return {
            "layout": name_of(self.layout, canonical),
            "dtype": str(x.dtype),
            "batch size": x.shape[0],
            "channels": x.shape[2],
            "width": self.reach + 1,
            "weight": weight is not None,
            "bias": bias is not None,
            "activation": self.activation,
        }


SCHEMA = schema_of(CallArguments)


def check(comm: Comm, arguments: CallArguments, x: Tensor, *others: Tensor | None) -> None:
    with naming_rank(comm):
        comm.check_device("x", x.device)
        layout = from_handle(arguments.layout)
        check_ranks_of(comm, layout=layout)
        tokens = layout.holdings[comm.rank].tokens
        if x.shape[1] != tokens:
            wanted = f"the {tokens} tokens its layout gives this rank"
            raise ValueError(f"x must have {wanted}, got {x.shape[1]}")
        if x.dtype not in DTYPES:
            raise ValueError(f"x must be of one of {DTYPES}, got {x.dtype}")
        dtypes = x.dtype, accumulator_dtype(x.dtype)
        shapes = (x.shape[2], arguments.reach + 1), (x.shape[2],)
        for name, other, shape in zip(("weight", "bias"), others, shapes, strict=True):
            if other is not None and (tuple(other.shape) != shape or other.dtype not in dtypes):
                wanted = f"{shape} of {' or '.join(map(str, dict.fromkeys(dtypes)))}"
                raise ValueError(
                    f"{name} must be {wanted}, got {tuple(other.shape)} of {other.dtype}"
                )


def as_activation(activation: object) -> str:
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        expected = "None, 'silu' or 'swish'"
        raise ValueError(f"activation must be {expected}, got {shown(activation)}")
    return ACTIVATIONS[activation]


def width_of(weight: Tensor | None) -> int:
    check_tensor("weight", weight)
    assert weight is not None
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be (C, w), with w at least 1, got {tuple(weight.shape)}")
    return int(weight.shape[1])


def room_of(layout: Layout, rank: int, reach: int) -> int:
    """Return the maximum number of rows that a rank receives in forward; can be traced."""
    rank = rank % layout.ranks
    lacking = layout.tokens - layout.tokens_on(rank)
    return torch.sym_min(reach * sizes_of(layout._sizes[rank]).continued, lacking)


def traffic(
    layout: Layout,
    rank: int,
    width: int,
    channels: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    activation: str | None = None,
) -> list[Traffic]:
    """Return a rank's messages in a call of `causal_conv1d` of this `width`, by pass and peer.

    A token's row is sent once to each rank that needs it; in backward with an activation, in fp32
    (fp64 for fp64). `token_shift` is a call of width 2. This computes and sends nothing.
    """
    back = accumulator_dtype(dtype) if as_activation(activation) else dtype
    return summed(
        [
            Traffic(direction, 0, peer, 1, count * batch * channels * rows.itemsize)
            for direction, rows in (("forward", dtype), ("backward", back))
            for peer, count in sent_rows(layout.geometry, rank, width - 1, direction == "backward")
        ]
    )


def check_tensors(x: Tensor, **others: Tensor | None) -> None:
    check_tensor("x", x)
    for name, tensor in {"x": x, **others}.items():
        if is_dtensor(tensor):
            instead = "channels are independent: give the local ones, as to_local() returns them"
            raise ValueError(f"{name} must be no DTensor: {instead}")
    if x.dim() not in (2, 3) or x.shape[-1] == 0:
        raise ValueError(f"x must be (T, C) or (B, T, C), with channels, got {tuple(x.shape)}")
    for name, other in others.items():
        if other is not None:
            check_tensor(name, other)
            if other.device != x.device:
                raise ValueError(f"{name} must be on x's device, {x.device}, got {other.device}")
