"""Move tokens from one layout to another, and their gradients back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.comm.messages.exchange import Comm, Group
from seqpar.core.arguments import Ints
from seqpar.core.device_tables import on_device
from seqpar.core.ranges import split_at
from seqpar.layout.geometry import Geometry
from seqpar.layout.reshard import check_part


class RemappedRows(NamedTuple):
    """A rank's rows in one layout, grouped by the rank that holds the same tokens in another."""

    rows: Ints  # (T_local,) the rows for each of these ranks, one rank after another
    counts: list[int]  # number of rows for each rank


def remap(x_local: Tensor, source: Geometry, target: Geometry, group: Group, dim: int) -> Tensor:
    if not np.array_equal(source.cu_seqlens, target.cu_seqlens):
        raise ValueError("to must be a layout of the same documents, in the same order")
    if source.ranks != target.ranks:
        raise ValueError(f"to must have the layout's {source.ranks} ranks, got {target.ranks}")
    dim, comm = check_part(x_local, source, group, dim)
    moved: Tensor = _Remap.apply(x_local.movedim(dim, 0), source, target, comm)
    return moved.movedim(0, dim)


class _RemapContext(FunctionCtx):
    layouts: tuple[Geometry, Geometry]
    comm: Comm


class _Remap(torch.autograd.Function):
    """`remap` along the first dimension. Backward moves the gradients the other way."""

    @staticmethod
    def forward(
        ctx: _RemapContext, x: Tensor, source: Geometry, target: Geometry, comm: Comm
    ) -> Tensor:
        ctx.layouts, ctx.comm = (source, target), comm
        return move(x, source, target, comm, "remap forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _RemapContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.layouts
        return move(gradient, target, source, ctx.comm, "remap backward"), None, None, None


def move(
    x: Tensor, source: Geometry, target: Geometry, comm: Comm, label: str, step: int = 0
) -> Tensor:
    """Send each rank the rows of x (T_local, …) that it holds in `target`."""
    leaving, sent = _share_on(comm.rank, source, target, x.device)
    places, arriving = _share_on(comm.rank, target, source, x.device)
    parts = x.index_select(0, leaving).split(sent)
    buffer = x.new_empty((sum(arriving), *x.shape[1:]))
    received = buffer.split(arriving)
    sends = [(peer, parts[peer]) for peer in comm.peers]
    recvs = [(peer, received[peer]) for peer in comm.peers]
    pending = comm.exchange(sends, recvs, label=label, step=step)
    received[comm.rank].copy_(parts[comm.rank])
    pending.wait()
    return torch.empty_like(buffer).index_copy_(0, places, buffer)


def share(rank: int, own: Geometry, other: Geometry) -> RemappedRows:
    """Group a rank's rows in `own` by the rank that holds them in `other`, in the pack's order."""
    holding, (edges, owners) = own.holdings[rank], _owners(other)
    first = own.cu_seqlens[holding.documents]
    starts, stops = first + holding.starts, first + holding.stops
    between, begin, end = split_at(edges, starts, stops)
    owner = np.repeat(owners[between], end - begin)
    counts = np.bincount(owner, minlength=own.ranks).tolist()
    return RemappedRows(np.argsort(owner, kind="stable"), counts)


def _share_on(
    rank: int, own: Geometry, other: Geometry, device: torch.device
) -> tuple[Tensor, list[int]]:
    def build() -> tuple[Tensor, list[int]]:
        rows, counts = share(rank, own, other)
        return torch.from_numpy(rows), counts

    rows, counts = own.derived_with(other)(("share", rank), build)
    return on_device(rows, device), counts


def _owners(geometry: Geometry) -> tuple[Ints, Ints]:
    """Return the start of each span in the pack, ascending, followed by T; and the spans' ranks."""

    def build() -> tuple[Ints, Ints]:
        starts = [geometry.cu_seqlens[x.documents] + x.starts for x in geometry.holdings]
        owners = np.repeat(np.arange(geometry.ranks), [x.size for x in starts])
        starts_of_all = np.concatenate(starts)
        order = np.argsort(starts_of_all)
        return np.r_[starts_of_all[order], geometry.tokens], owners[order]

    return geometry.derived(("owners",), build)
