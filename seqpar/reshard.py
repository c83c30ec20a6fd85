"""Moving packed tensors between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Group
from seqpar.layout import Layout


def unshard(x_local: Tensor, layout: Layout, group: Group, dim: int = 0) -> Tensor:
    """`Layout.unshard`: (T_local, …) -> (T, …) along `dim`, on every rank."""
    comm = Comm.of(group)
    if layout.ranks != comm.size:
        raise ValueError(f"group must have the layout's {layout.ranks} ranks, got {comm.size}")
    expected = layout.tokens_on(comm.rank)
    if not -x_local.dim() <= dim < x_local.dim() or x_local.shape[dim] != expected:
        shape = tuple(x_local.shape)
        raise ValueError(f"x_local must have {expected} tokens (rank {comm.rank}'s) along dim {dim}, got {shape}")
    gathered: Tensor = _Unshard.apply(x_local.movedim(dim, 0), layout, comm)
    return gathered.movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """Rows come first here: (T_local, …) -> (T, …)."""

    @staticmethod
    def forward(ctx: Any, x_local: Tensor, layout: Layout, comm: Comm) -> Tensor:
        ctx.layout, ctx.comm = layout, comm
        x_local = x_local.contiguous()
        parts = [
            x_local if rank == comm.rank else x_local.new_empty((layout.tokens_on(rank), *x_local.shape[1:]))
            for rank in range(comm.size)
        ]
        comm.doing = "unshard forward"
        comm.exchange([(peer, x_local) for peer in comm.others], [(peer, parts[peer]) for peer in comm.others]).wait()
        packed = x_local.new_empty((layout.tokens, *x_local.shape[1:]))
        for rank, part in enumerate(parts):
            packed[layout.token_indices(rank, x_local.device)] = part
        return packed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Each rank sends each owner the gradient of its tokens; the owner sums them in rank order, in fp32 at least."""
        layout, comm = ctx.layout, ctx.comm
        parts = [gradient[layout.token_indices(rank, gradient.device)] for rank in range(comm.size)]
        received = [part if rank == comm.rank else torch.empty_like(parts[comm.rank]) for rank, part in enumerate(parts)]
        comm.doing = "unshard backward"
        comm.exchange([(peer, parts[peer]) for peer in comm.others], [(peer, received[peer]) for peer in comm.others]).wait()
        total = received[0].to(torch.promote_types(gradient.dtype, torch.float32))
        for part in received[1:]:
            total = total + part
        return total.to(gradient.dtype), None, None
