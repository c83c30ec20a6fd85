"""torch's own backends, collectives and context parallel, for reports and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.comm.launch import mesh_of_all


def available() -> dict[str, bool]:
    """Return the names of backends for messages, each with whether this build of torch has it."""
    found = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return {name: bool(is_here()) for name, is_here in found.items()}


def rank_of_all() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


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
    """Exchange equal parts of a contiguous tensor between all processes, also in backward."""
    received: Tensor = _AllToAll.apply(sent)
    return received


@contextmanager
def context_parallel(buffer: Tensor) -> Iterator[None]:
    """Run SDPA within torch's context parallel over all processes; `buffer` stays cut."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, kept = mesh_of_all(buffer.device, (dist.get_world_size(),)), {buffer}
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers=kept):
        yield
