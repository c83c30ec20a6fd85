"""A short causal convolution and a token shift over sharded tokens, for users."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.module import is_meta, raise_fault
from seqpar.attention.operands import as_autocast, check_layouts
from seqpar.attention.operators import refuse_tangents, register_flop_formulas
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.dtensor import is_dtensor
from seqpar.comm.messages.comm import Comm, Group
from seqpar.core.arguments import as_bool, check_tensor, shown
from seqpar.core.compiling import constant_in_graphs, is_traced, outside_graphs
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic, summed
from seqpar.halo.halo_operator import CONVOLUTION, ConvolutionArguments, ConvolutionTensors, Halo
from seqpar.halo.rows import sent_rows
from seqpar.layout.handle import sizes_of
from seqpar.layout.layout import Layout

ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    layout: Layout,
    group: Group,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    check_ranks: bool = False,
) -> Tensor:
    """Convolve each channel causally, within each document, over tokens on all ranks.

    The result is out_t = activation(bias + Σ_j weight[:, j] · x_{t−w+1+j}), where tokens before the
    document's first token are 0. On each document, this equals `causal_conv1d_fn` of the package
    causal-conv1d. Any layout is accepted: the w − 1 tokens before a span are received from the
    ranks that hold them.

    In forward, a rank sends each of its rows once to each rank that needs the row for one of the w
    − 1 tokens after it. A row has C elements in x's dtype. In backward, a rank sends the gradient
    of the sum at a token to each other rank that has one of the w − 1 tokens before this token.
    With an activation, gradients are sent in fp32 (fp64 for fp64), and otherwise in x's dtype. Each
    position at which a document is cut between ranks costs w − 1 rows in either pass, if such
    positions are at least w − 1 tokens apart. `seqpar.halo.functions.traffic` returns the messages
    of each rank.

    Sums are computed in fp32 (fp64 for fp64), and rounded once. Backward keeps x and the received
    rows.

    Args:
        x: (T_local, C) or (B, T_local, C), in the layout's local order; fp64, fp32, bf16 or fp16.
            Autocast casts x as for a convolution.
        weight: (C, w), in x's dtype or in fp32. The taps. The last tap is for the token itself. The
            gradients of weight and bias come only from this rank's outputs. Sum them over ranks,
            like the gradients of other parameters.
        layout: the tokens of the packed batch that each rank holds.
        group: a process group or a mesh. Ranks of a mesh are counted along its rows.
        bias: (C,), in x's dtype or in fp32.
        activation: "silu", which is also called "swish", or None.
        check_ranks: whether to compare a digest of the call between ranks first, in ⌈log₂ P⌉
            messages of 64 bytes. If ranks make different calls, all ranks then raise the same
            ValueError, and no rank hangs.

    Returns:
        A tensor with the shape and dtype of x.

    Raises:
        ValueError: if an argument is wrong. The error names the argument, and nothing is sent.
    """
    return _call(x, (weight, bias, activation), layout, group, check_ranks)


def token_shift(x: Tensor, layout: Layout, group: Group, *, check_ranks: bool = False) -> Tensor:
    """Return, for each token, the row of the previous token of its document, or 0 for the first
    token.

    This is the token shift of RWKV. Rows are copied without rounding. The arguments, the result,
    the errors and the number of sent bytes are those of a call of `causal_conv1d` with w = 2 and
    without an activation.
    """
    return _call(x, None, layout, group, check_ranks)


def _call(
    x: Tensor,
    convolution: tuple[Tensor, Tensor | None, str | None] | None,
    layout: Layout,
    group: Group,
    check_ranks: bool,
) -> Tensor:
    weight, bias, activation = convolution or (None, None, None)
    bound = None
    check_ranks = as_bool("check_ranks", check_ranks)
    if is_traced():
        rank, key = _kept_on(group, check_ranks)
    else:
        bound = halo_on(group, check_ranks)  # keeps its key valid until the call
        rank, key = bound.comm.rank, bound.key
    try:
        reach = 1 if convolution is None else width_of(weight) - 1
        check_tensors(x, weight=weight, bias=bias)
        name = as_activation(activation)
        check_layouts(layout=layout)
        refuse_tangents(x=x, weight=weight, bias=bias)
    except ValueError as fault:
        if bound is None:
            raise  # the frame then runs uncompiled, and all ranks raise the error
        raise_fault(bound, fault, x, weight, bias)
    x = as_autocast(x)
    room = room_of(layout, rank, reach)
    arguments = ConvolutionArguments(layout._handle, room, key, reach, name)
    tensors = ConvolutionTensors(x if x.dim() == 3 else x[None], weight, bias)
    if bound is not None and is_meta(x):  # the operator's fake rule checks nothing
        CONVOLUTION.resolve(bound, tensors, arguments)
    out = CONVOLUTION(tensors, arguments)[0]
    return out if x.dim() == 3 else out[0]


def halo_on(group: Group, check_ranks: bool = False) -> BoundStrategy[Halo]:
    """Return the strategy of convolutions, bound to a process group or to a mesh of any shape."""
    register_flop_formulas()
    return BoundStrategy.make(Halo(), group, len(Comm.of(group).shape), check_ranks)


@constant_in_graphs
def _kept_on(group: Group, check_ranks: bool) -> tuple[int, str]:
    bound = halo_on(group, check_ranks)
    bound.keep()
    return bound.comm.rank, bound.key


@outside_graphs
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
    """Return the messages of a rank in a call of `causal_conv1d`, by pass and peer.

    A token's row is sent once to each rank that needs it. In backward with an activation, rows are
    in fp32 (fp64 for fp64). For `token_shift`, pass the width 2. This function computes and sends
    nothing.
    """
    back = accumulator_dtype(dtype) if as_activation(activation) else dtype
    return summed(
        [
            Traffic(direction, 0, peer, 1, count * batch * channels * rows.itemsize)
            for direction, rows in (("forward", dtype), ("backward", back))
            for peer, count in sent_rows(layout.geometry, rank, width - 1, direction == "backward")
        ]
    )


def room_of(layout: Layout, rank: int, reach: int) -> int:
    """Return an upper limit for the number of rows that a rank receives in forward.

    torch.compile can trace this function.
    """
    rank = rank % layout.ranks
    lacking = layout.tokens - layout.tokens_on(rank)
    return torch.sym_min(reach * sizes_of(layout._sizes[rank]).continued, lacking)


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


def check_tensors(x: Tensor, **others: Tensor | None) -> None:
    check_tensor("x", x)
    for name, tensor in {"x": x, **others}.items():
        if is_dtensor(tensor):
            instead = "channels are independent: give the local ones, as to_local() returns them"
            raise ValueError(f"{name} must not be a DTensor: {instead}")
    if x.dim() not in (2, 3) or x.shape[-1] == 0:
        raise ValueError(f"x must be (T, C) or (B, T, C), with channels, got {tuple(x.shape)}")
    for name, other in others.items():
        if other is not None:
            check_tensor(name, other)
            if other.device != x.device:
                raise ValueError(f"{name} must be on x's device, {x.device}, got {other.device}")
