"""torch's own collectives and context parallel, for benchmarks that compare them with seqpar."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def rank_of_all() -> tuple[int, int]:
    """Return this process's rank, and the number of processes."""
    return dist.get_rank(), dist.get_world_size()


def all_to_all(sent: Tensor) -> Tensor:
    """Exchange equal parts of `sent` between all processes; return the received parts."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


@functools.cache
def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


@contextmanager
def context_parallel(buffer: Tensor, dim: int = 0) -> Iterator[None]:
    """Run SDPA within torch's context parallel over all processes; `buffer` stays cut."""
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(
        _mesh(buffer.device.type),
        buffers=[buffer],
        buffer_seq_dims=[dim],
        no_restore_buffers={buffer},
    ):
        yield
