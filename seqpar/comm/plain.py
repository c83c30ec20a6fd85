"""torch's own backends, collectives and context parallelism, for reports and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from seqpar.comm.launch import mesh_of_all
from seqpar.comm.messages.comm import Comm, Group


def available() -> dict[str, bool]:
    """Return, for the name of each communication backend, whether this build of torch has the
    backend.
    """
    found = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return {name: bool(is_here()) for name, is_here in found.items()}


def rank_of_all() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def members_of(group: Group | None) -> tuple[int, list[int]]:
    """Return this process's rank in a group, and the global rank of each rank of the group.

    If `group` is None, the group is the default group. If there is no default group, the group is
    this process alone.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, [0]
    if group is None:
        members = list(range(dist.get_world_size()))
    elif isinstance(group, DeviceMesh):
        members = group.mesh.flatten().tolist()
    elif isinstance(group, dist.ProcessGroup):
        members = dist.get_process_group_ranks(group)
    else:
        members = Comm.of(group).processes
    return dist.get_rank(), members


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return all_to_all(gradient.contiguous())


def all_to_all(sent: Tensor) -> Tensor:
    """Exchange equal blocks of a contiguous tensor between all processes, with support for
    autograd.
    """
    received: Tensor = _AllToAll.apply(sent)
    return received


@contextmanager
def context_parallel(buffer: Tensor) -> Iterator[None]:
    """Run SDPA with torch's context parallelism over all processes. `buffer` stays sharded."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, kept = mesh_of_all(buffer.device, (dist.get_world_size(),)), {buffer}
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers=kept):
        yield
