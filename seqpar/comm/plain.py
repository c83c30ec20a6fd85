"""What torch itself offers to all processes: what others build on, to be measured beside ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def rank_of_all() -> tuple[int, int]:
    """Return this process's rank among all, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def all_to_all(sent: Tensor) -> Tensor:
    """Return what all processes sent to this one; each sends an equal part to each."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


@functools.cache
def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


@contextmanager
def context_parallel(buffer: Tensor, dim: int = 0) -> Iterator[None]:
    """Let SDPA be torch's context parallel over all processes, which cuts `buffer` for good."""
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(
        _mesh(buffer.device.type),
        buffers=[buffer],
        buffer_seq_dims=[dim],
        no_restore_buffers={buffer},
    ):
        yield
