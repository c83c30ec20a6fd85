"""Move packed tensors between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.arguments import as_int, as_tensor
from seqpar.comm.exchange import Comm, Group
from seqpar.layout.geometry import Geometry


def unshard(x_local: Tensor, geometry: Geometry, group: Group, dim: int = 0) -> Tensor:
    """Return the packed tensor, (T_local, …) -> (T, …) along `dim`; see `Layout.unshard`."""
    x_local, dim, comm = as_tensor("x_local", x_local), as_int("dim", dim), Comm.of(group)
    if geometry.ranks != comm.size:
        raise ValueError(f"group must have the layout's {geometry.ranks} ranks, got {comm.size}")
    expected = geometry.holdings[comm.rank].tokens
    if not -x_local.dim() <= dim < x_local.dim() or x_local.shape[dim] != expected:
        where, found = f"(rank {comm.rank}'s) along dim {dim}", tuple(x_local.shape)
        raise ValueError(f"x_local must have {expected} tokens {where}, got {found}")
    packed: Tensor = _Unshard.apply(x_local.movedim(dim, 0), geometry, comm)
    return packed.movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """`unshard` along the first dimension: (T_local, …) -> (T, …)."""

    @staticmethod
    def forward(ctx: Any, x_local: Tensor, geometry: Geometry, comm: Comm) -> Tensor:
        ctx.geometry, ctx.comm = geometry, comm
        x_local = x_local.contiguous()
        shapes = [(holding.tokens, *x_local.shape[1:]) for holding in geometry.holdings]
        parts = [
            x_local if rank == comm.rank else x_local.new_empty(shape)
            for rank, shape in enumerate(shapes)
        ]
        sends = [(peer, x_local) for peer in comm.peers]
        recvs = [(peer, parts[peer]) for peer in comm.peers]
        comm.exchange(sends, recvs, label="unshard forward").wait()
        packed = x_local.new_empty((geometry.tokens, *x_local.shape[1:]))
        for part, index in zip(parts, _token_indices(geometry, x_local.device), strict=True):
            packed[index] = part
        return packed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Send each rank the gradient of its tokens; sum in rank order, in fp32 at least."""
        geometry, comm = ctx.geometry, ctx.comm
        parts = [gradient[index] for index in _token_indices(geometry, gradient.device)]
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


def _token_indices(geometry: Geometry, device: torch.device) -> list[Tensor]:
    """Return each rank's token indices in the packed batch."""
    indices = map(geometry.token_indices, range(geometry.ranks))
    return [torch.from_numpy(index).to(device) for index in indices]
