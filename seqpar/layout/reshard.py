"""Exchanges that move packed tensors from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.comm.messages.comm import Comm, Group
from seqpar.core.arguments import Ints, as_dim, check_tensor, shown
from seqpar.core.device_tables import kept_on
from seqpar.core.memo import LOCAL
from seqpar.core.ranges import split_at
from seqpar.layout.geometry import Geometry

_CPU = torch.device("cpu")


def shard(x: Tensor, indices: Tensor, dim: int, tokens: int, real: int, value: float) -> Tensor:
    """Return a rank's tokens of a packed tensor, (T, …) -> (T_local, …), for `Layout.shard`.

    Args:
        x: the packed tensor, with or without padding.
        indices: (T_local,). The indices of the rank's tokens in the pack.
        dim: the dimension of the tokens.
        tokens: the number of tokens in the pack, with padding.
        real: the number of tokens without padding. The padding is at the end.
        value: the value of the padding in the result, if x has no padding.
    """
    dim = as_dim("dim", dim)
    length = x.shape[dim] if -x.dim() <= dim < x.dim() else -1
    if length == tokens:
        return x.index_select(dim, indices)
    if length != real:
        expected = tokens if tokens == real else f"{tokens} or {real}"
        where, found = f"along dim {dim}", tuple(x.shape)
        raise ValueError(f"x must have {expected} tokens (the layout's) {where}, got {found}")
    _check_value(value, x.dtype)
    padding = (indices >= real).reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return x.index_select(dim, indices.clamp(max=real - 1)).masked_fill(padding, _as_plain(value))


def _check_value(value: float, dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        fits = value in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        limit = torch.finfo(dtype).max
        finite = isinstance(value, int) or (isinstance(value, Real) and math.isfinite(value))
        fits = abs(value) <= limit if finite else isinstance(value, Real)
    else:
        limits = torch.iinfo(dtype)
        fits = isinstance(value, Real) and limits.min <= value <= limits.max and value % 1 == 0
    if not fits:
        raise ValueError(f"value must be a number that {dtype} can hold, got {shown(value)}")


def _as_plain(value: float) -> float:
    """Return any real number, such as a Fraction, as a number that torch accepts."""
    if isinstance(value, int | float):
        return value
    return int(value) if value % 1 == 0 else float(value)


def unshard(x_local: Tensor, geometry: Geometry, group: Group, dim: int = 0) -> Tensor:
    dim, comm = check_part(x_local, geometry, group, dim)
    packed: Tensor = _Unshard.apply(x_local.movedim(dim, 0), geometry, comm)
    return packed.movedim(0, dim)


def check_part(x_local: Tensor, geometry: Geometry, group: Group, dim: int) -> tuple[int, Comm]:
    """Return `dim` as an int, and the Comm of a new call.

    Raise a ValueError unless x_local has as many tokens as this rank holds.
    """
    check_tensor("x_local", x_local)
    dim, comm = as_dim("dim", dim), Comm.of(group)
    if geometry.ranks != comm.size:
        raise ValueError(f"group must have the layout's {geometry.ranks} ranks, got {comm.size}")
    expected = geometry.holdings[comm.rank].tokens
    if not -x_local.dim() <= dim < x_local.dim() or x_local.shape[dim] != expected:
        where, found = f"(rank {comm.rank}'s) along dim {dim}", tuple(x_local.shape)
        raise ValueError(f"x_local must have {expected} tokens {where}, got {found}")
    comm.check_device("x_local", x_local.device)
    comm.join(x_local.device)
    return dim, comm.call()


class _Context(FunctionCtx):
    layouts: tuple[Geometry, ...]
    comm: Comm


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x_local: Tensor, geometry: Geometry, comm: Comm) -> Tensor:
        ctx.layouts, ctx.comm = (geometry,), comm
        x_local, index = x_local.contiguous(), _in_packed_order(geometry, x_local.device)
        buffer = x_local.new_empty((geometry.tokens, *x_local.shape[1:]))
        received = buffer.split([holding.tokens for holding in geometry.holdings])
        _exchange(comm, [x_local] * comm.size, received, "unshard forward")
        return torch.empty_like(buffer).index_copy_(0, index, buffer)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradient of each token in the order of the ranks, at least in fp32."""
        (geometry,), comm = ctx.layouts, ctx.comm
        rows = gradient.index_select(0, _in_packed_order(geometry, gradient.device))
        parts = rows.split([holding.tokens for holding in geometry.holdings])
        received = [torch.empty_like(parts[comm.rank]) for _ in parts]
        received[comm.rank] = parts[comm.rank]
        _exchange(comm, parts, received, "unshard backward")
        total = received[0].to(torch.promote_types(gradient.dtype, torch.float32))
        for part in received[1:]:
            total = total + part
        return total.to(gradient.dtype), None, None


def _exchange(
    comm: Comm, parts: Sequence[Tensor], received: Sequence[Tensor], label: str, step: int = 0
) -> None:
    """Send one tensor to each rank and receive one tensor from each rank, including this rank."""
    sends = [(peer, parts[peer]) for peer in comm.peers]
    recvs = [(peer, received[peer]) for peer in comm.peers]
    pending = comm.exchange(sends, recvs, label=label, step=step)
    received[comm.rank].copy_(parts[comm.rank])
    pending.wait()


def _in_packed_order(geometry: Geometry, device: torch.device) -> Tensor:
    """Return each token's index in the pack, (T,), for tokens that are ordered by rank, then by
    row.
    """

    def build() -> Tensor:
        indices = [geometry.token_indices(rank) for rank in range(geometry.ranks)]
        return torch.from_numpy(np.concatenate(indices))

    return kept_on(device, geometry.derived, (LOCAL, "in packed order"), build)


def remap(x_local: Tensor, source: Geometry, target: Geometry, group: Group, dim: int) -> Tensor:
    if not np.array_equal(source.cu_seqlens, target.cu_seqlens):
        raise ValueError("to must be a layout of the same documents, in the same order")
    if source.ranks != target.ranks:
        raise ValueError(f"to must have the layout's {source.ranks} ranks, got {target.ranks}")
    dim, comm = check_part(x_local, source, group, dim)
    moved: Tensor = _Remap.apply(x_local.movedim(dim, 0), source, target, comm)
    return moved.movedim(0, dim)


class _Remap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, source: Geometry, target: Geometry, comm: Comm) -> Tensor:
        ctx.layouts, ctx.comm = (source, target), comm
        return move(x, source, target, comm, "remap forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.layouts
        return move(gradient, target, source, ctx.comm, "remap backward"), None, None, None


def move(
    x: Tensor, source: Geometry, target: Geometry, comm: Comm, label: str, step: int = 0
) -> Tensor:
    """Send each rank those rows of x (T_local, …) that it holds in the layout `target`."""
    leaving, sent = share(comm.rank, source, target, x.device)
    places, arriving = share(comm.rank, target, source, x.device)
    parts = x.index_select(0, leaving).split(sent)
    buffer = x.new_empty((sum(arriving), *x.shape[1:]))
    _exchange(comm, parts, buffer.split(arriving), label, step)
    return torch.empty_like(buffer).index_copy_(0, places, buffer)


def share(
    rank: int, own: Geometry, other: Geometry, device: torch.device = _CPU
) -> tuple[Tensor, list[int]]:
    """Return which rows of a rank are sent to which rank when tokens move to another layout.

    The result is the rank's rows in the layout `own`, (T_local,) on `device`, sorted by the rank
    that holds the token in the layout `other`, and a list with the number of rows for each rank.
    Rows for the same rank are in the order of the packed batch.
    """

    def build() -> tuple[Tensor, list[int]]:
        holding, (edges, owners) = own.holdings[rank], _owners(other)
        first = own.cu_seqlens[holding.documents]
        between, begin, end = split_at(edges, first + holding.starts, first + holding.stops)
        owner = np.repeat(owners[between], end - begin)
        counts = np.bincount(owner, minlength=own.ranks).tolist()
        return torch.from_numpy(np.argsort(owner, kind="stable")), counts

    return kept_on(device, own.derived_with(other), ("share", rank), build)


def _owners(geometry: Geometry) -> tuple[Ints, Ints]:
    """Return the start of each span in the pack, and the rank of each span.

    The starts (n + 1,) ascend. The last element is T, the number of tokens.
    """

    def build() -> tuple[Ints, Ints]:
        owners, documents, starts, _ = geometry.all_spans()
        starts = geometry.cu_seqlens[documents] + starts
        order = np.argsort(starts)
        return np.r_[starts[order], geometry.tokens], owners[order]

    return geometry.derived(("owners",), build)
