"""A short causal convolution and a token shift over sharded tokens, for users."""

from __future__ import annotations

import torch
from torch import Tensor

import seqpar.halo.operator  # noqa: F401  defines torch.ops.seqpar.causal_conv1d
from seqpar.attention.module import is_meta, raise_fault
from seqpar.attention.operands import as_autocast, check_layouts
from seqpar.attention.operators import refuse_tangents, register_flop_formulas
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.core.arguments import as_bool
from seqpar.core.compiling import constant_in_graphs
from seqpar.halo.call import (
    CallArguments,
    Halo,
    as_activation,
    check,
    check_tensors,
    room_of,
    width_of,
)
from seqpar.layout.layout import Layout


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

    out_t = activation(bias + Σ_j weight[:, j] · x_{t−w+1+j}), where tokens before the document's
    first are 0. This equals `causal_conv1d_fn` of the package causal-conv1d on each document. It
    takes any layout: the w − 1 tokens before a span come from the ranks that hold them.

    In forward, a rank sends each of its rows, C elements in x's dtype, once to each rank that needs
    it for one of the w − 1 tokens after it. In backward, it sends the gradients of its sums to each
    rank that has one of the w − 1 tokens before them: in x's dtype without an activation, in fp32
    (fp64 for fp64) with one. Each place where a document is cut between ranks costs w − 1 rows in
    either pass, whatever the lengths, if such places are at least w − 1 tokens apart.
    `seqpar.halo.call.traffic` returns the messages of each rank.

    Sums are computed in fp32 (fp64 for fp64), and rounded once. Backward keeps x and the received
    rows.

    Args:
        x: (T_local, C) or (B, T_local, C), in the layout's local order; fp64, fp32, bf16 or fp16.
            Autocast casts it as for a convolution.
        weight: (C, w), the taps, the last one for the token itself; in x's dtype or in fp32. The
            gradients of weight and bias are those through this rank's outputs: sum them over
            ranks, like the gradients of other parameters.
        layout: the tokens of the packed batch that each rank holds.
        group: the ranks: a process group or a mesh, whose ranks count along its rows.
        bias: (C,), in x's dtype or in fp32.
        activation: "silu", which is also called "swish", or None.
        check_ranks: compare a digest of the call over the ranks first, in ⌈log₂ P⌉ messages of 64
            bytes, so that ranks that disagree all raise the same ValueError instead of hanging.

    Returns:
        A tensor with the shape and dtype of x.

    Raises:
        ValueError: if an argument is wrong. It names the argument, and nothing is sent.
    """
    return _call(x, (weight, bias, activation), layout, group, check_ranks)


def token_shift(x: Tensor, layout: Layout, group: Group, *, check_ranks: bool = False) -> Tensor:
    """Return the row of the token before each token of its document, or 0 before the first.

    This is RWKV's shift; it does not change bits. Arguments, result, errors and bytes, also of
    gradients, are as in a `causal_conv1d` of width 2 without an activation.
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
    if torch.compiler.is_compiling():
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
            raise  # the frame then runs uncompiled and reaches this line again
        raise_fault(bound, fault, x, weight, bias)
    x = as_autocast(x)
    room = room_of(layout, rank, reach)
    arguments = CallArguments(layout._handle, room, key, reach, name)
    rows = x if x.dim() == 3 else x[None]
    if bound is not None and is_meta(x):  # the operator's fake rule checks nothing
        check(bound.comm, arguments, rows, weight, bias)
    out: Tensor = torch.ops.seqpar.causal_conv1d(rows, weight, bias, *arguments)[0]
    return out if x.dim() == 3 else out[0]


def halo_on(group: Group, check_ranks: bool = False) -> BoundStrategy[Halo]:
    """Return the operator's strategy on a group, or on a mesh of any shape."""
    register_flop_formulas()
    return BoundStrategy.make(Halo(), group, len(Comm.of(group).shape), check_ranks)


@constant_in_graphs
def _kept_on(group: Group, check_ranks: bool) -> tuple[int, str]:
    """Return this process's rank, and the key of the strategy, which the group keeps alive."""
    bound = halo_on(group, check_ranks)
    bound.keep()
    return bound.comm.rank, bound.key
