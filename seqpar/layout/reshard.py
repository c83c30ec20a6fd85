"""Move packed tensors between layouts."""

from __future__ import annotations

from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.comm.messages.exchange import Comm, Group
from seqpar.core.arguments import as_dim, check_tensor, shown
from seqpar.layout.geometry import Geometry


def shard(x: Tensor, indices: Tensor, dim: int, tokens: int, real: int, value: float) -> Tensor:
    """Return a rank's part of a packed tensor, (T, …) -> (T_local, …); see `Layout.shard`.

    `indices` are the rank's among `tokens`, of which the first `real` are not padding.
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
    return x.index_select(dim, indices.clamp(max=real - 1)).masked_fill(padding, value)


def _check_value(value: float, dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        fits = value in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        # An int beyond float's range cannot be converted.
        fits = isinstance(value, Real) and not (
            isinstance(value, int) and value.bit_length() > 1023
        )
    else:
        limits = torch.iinfo(dtype)
        fits = isinstance(value, Real) and limits.min <= value <= limits.max and value % 1 == 0
    if not fits:
        raise ValueError(f"value must be a number that {dtype} can hold, got {shown(value)}")


def unshard(x_local: Tensor, geometry: Geometry, group: Group, dim: int = 0) -> Tensor:
    dim, comm = check_part(x_local, geometry, group, dim)
    packed: Tensor = _Unshard.apply(x_local.movedim(dim, 0), geometry, comm)
    return packed.movedim(0, dim)


def check_part(x_local: Tensor, geometry: Geometry, group: Group, dim: int) -> tuple[int, Comm]:
    """Return `dim` and the Comm of a new call; raise unless x_local is this rank's part."""
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


class _UnshardContext(FunctionCtx):
    geometry: Geometry
    comm: Comm


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _UnshardContext, x_local: Tensor, geometry: Geometry, comm: Comm) -> Tensor:
        ctx.geometry, ctx.comm = geometry, comm
        x_local, index = x_local.contiguous(), _in_packed_order(geometry, x_local.device)
        buffer = x_local.new_empty((geometry.tokens, *x_local.shape[1:]))
        parts = buffer.split([holding.tokens for holding in geometry.holdings])
        sends = [(peer, x_local) for peer in comm.peers]
        recvs = [(peer, parts[peer]) for peer in comm.peers]
        pending = comm.exchange(sends, recvs, label="unshard forward")
        parts[comm.rank].copy_(x_local)
        pending.wait()
        return torch.empty_like(buffer).index_copy_(0, index, buffer)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _UnshardContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sum each token's gradient in rank order, in fp32 at least."""
        geometry, comm = ctx.geometry, ctx.comm
        rows = gradient.index_select(0, _in_packed_order(geometry, gradient.device))
        parts = rows.split([holding.tokens for holding in geometry.holdings])
        local = parts[comm.rank]
        received = [
            local if rank == comm.rank else torch.empty_like(local) for rank in range(comm.size)
        ]
        sends = [(peer, parts[peer]) for peer in comm.peers]
        recvs = [(peer, received[peer]) for peer in comm.peers]
        comm.exchange(sends, recvs, label="unshard backward").wait()
        total = received[0].to(torch.promote_types(gradient.dtype, torch.float32))
        for part in received[1:]:
            total = total + part
        return total.to(gradient.dtype), None, None


def _in_packed_order(geometry: Geometry, device: torch.device) -> Tensor:
    """Return (T,): the index in the packed batch of all ranks' tokens, one rank after another."""

    def build() -> Tensor:
        indices = [geometry.token_indices(rank) for rank in range(geometry.ranks)]
        return torch.from_numpy(np.concatenate(indices)).to(device)

    return geometry.derived(("in packed order", device), build)
