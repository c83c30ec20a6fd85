"""What users call: a short causal convolution and a token shift over sharded tokens."""

from __future__ import annotations

import torch
from torch import Tensor

import seqpar.halo.operator  # noqa: F401  defines torch.ops.seqpar.causal_conv1d
from seqpar.attention.module import is_meta, raise_fault
from seqpar.attention.operands import check_layouts
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
    first are 0: what `causal_conv1d_fn` of the package causal-conv1d computes, by document. It
    takes any layout: the w − 1 tokens before a span come from whoever holds them.

    A rank sends each of its tokens' rows, C elements, once to each rank that has one of the w − 1
    tokens behind it but lacks it: in forward in x's dtype. In backward it sends the gradients of
    its sums to each rank that has one of the w − 1 tokens before them, in x's dtype without an
    activation, and with one in fp32 (fp64 for fp64). So where each of N documents is cut between
    ranks in n places at least w − 1 tokens apart, all ranks together send n·(w − 1) rows in either
    pass, whatever the lengths. `seqpar.halo.call.traffic` says what each rank sends.

    Sums are computed in fp32 (fp64 for fp64), and rounded once. Kept for backward: x, and the rows
    that were received.

    Args:
        x: (T_local, C) or (B, T_local, C), in the layout's local order; fp64, fp32, bf16 or fp16.
            Under autocast it is cast as a convolution's is.
        weight: (C, w), the taps, the last one for the token itself; in x's dtype or in fp32. Its
            gradient and the bias's are those through this rank's outputs alone: sum them over
            ranks, as a parameter's.
        layout: which tokens of the packed batch each rank holds.
        group: the ranks: a process group or a mesh, whose ranks count along its rows.
        bias: (C,), likewise.
        activation: "silu", which is also called "swish", or None.
        check_ranks: compare a digest of the call over the ranks first (32 bytes to each peer), so
            that ranks that disagree all raise the same ValueError instead of hanging.

    Returns:
        What x is, in its dtype.

    Raises:
        ValueError: if the call is wrong. It names the argument, and is raised before anything is
            sent.
    """
    return _call(x, weight, bias, layout, group, activation, check_ranks)


def token_shift(x: Tensor, layout: Layout, group: Group, *, check_ranks: bool = False) -> Tensor:
    """Return the token before each one in its document, or 0 for the first one.

    It is RWKV's shift, and moves the bits as they are. Arguments, result, errors and bytes are
    those of a `causal_conv1d` of width 2 without an activation, gradients included.
    """
    return _call(x, None, None, layout, group, None, check_ranks, shifts=True)


def _call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    group: Group,
    activation: str | None,
    check_ranks: bool,
    shifts: bool = False,
) -> Tensor:
    bound = None
    check_ranks = as_bool("check_ranks", check_ranks)
    if torch.compiler.is_compiling():
        rank, key = _kept_on(group, check_ranks)
    else:
        bound = halo_on(group, check_ranks)  # which lives until the call is made
        rank, key = bound.comm.rank, bound.key
    try:
        reach = 1 if shifts else width_of(weight) - 1
        check_tensors(x, weight=weight, bias=bias)
        name = as_activation(activation)
        check_layouts(layout=layout)
        refuse_tangents(x=x, weight=weight, bias=bias)
    except ValueError as fault:
        if bound is None:
            raise  # the frame then runs without being compiled, and comes here again
        raise_fault(bound, fault, alone=is_meta(x))
    x = _cast(x)
    room = room_of(layout, rank, reach)
    arguments = CallArguments(layout._handle, room, key, reach, name)
    rows = x if x.dim() == 3 else x[None]
    if bound is not None and is_meta(x):  # whose operator runs its fake rule
        check(bound.comm, arguments, rows, weight, bias)
    out: Tensor = torch.ops.seqpar.causal_conv1d(rows, weight, bias, *arguments)[0]
    return out if x.dim() == 3 else out[0]


def _cast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype, where a convolution would cast it."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def halo_on(group: Group, check_ranks: bool = False) -> BoundStrategy[Halo]:
    """Return the operator's strategy on a group, or on a mesh of any shape."""
    register_flop_formulas()
    return BoundStrategy.make(Halo(), group, len(Comm.of(group).shape), check_ranks)


@constant_in_graphs
def _kept_on(group: Group, check_ranks: bool) -> tuple[int, str]:
    """Return this process's rank, and the key of the strategy, which stays with the group."""
    bound = halo_on(group, check_ranks)
    bound.keep()
    return bound.comm.rank, bound.key
