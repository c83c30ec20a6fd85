"""Communicators on NCCL: a group's own, and further ones over the same ranks.

A communicator runs its exchanges one after another, in the order posted. So messages that must not
wait for each other, such as those in two directions, go through a communicator each.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from seqpar.comm.header import Message

Backend = Any  # a process group's backend for a kind of device; torch's stubs lack its methods


class Communicators:
    """The communicators of a process group on NCCL, by name; all Comms of the group share them."""

    def __init__(self) -> None:
        self.device: torch.device | None = None  # which they are for, once the group's own is made
        self._channels: dict[str, Backend] = {}

    def join(self, group: ProcessGroup, device: torch.device) -> None:
        """Make the group's own communicator for a device, the first time, with all ranks."""
        if self.device is None:
            self.device = device
            _make(group._get_backend(device), device)

    def channel(self, group: ProcessGroup, name: str) -> Backend | None:
        """Return the further communicator of this name, made the first time, with all ranks.

        None means the group's own: it has not been made, or the group is not on NCCL.
        """
        if self.device is None:
            return None
        if name not in self._channels:
            self._channels[name] = _open(group, name, self.device)
        return self._channels[name]


def _open(group: ProcessGroup, name: str, device: torch.device) -> Backend | None:
    """Make a communicator over a group's ranks.

    This is no `dist.new_group`: where a device is bound, that one splits the default group's
    communicator, for which it needs all of its ranks, and not only this group's.
    """
    own: Backend = group._get_backend(device)
    if not dist.is_nccl_available() or not isinstance(own, dist.ProcessGroupNCCL):
        return None
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config, options._timeout = own.options.config, own.options._timeout
    options.group_name = f"{group.group_name}/{name}"
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    prefix = f"seqpar/{options.group_name}/"
    store = dist.PrefixStore(prefix, group.get_group_store())  # type: ignore[attr-defined]
    channel: Backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    _make(channel, device)
    weakref.finalize(group, channel.shutdown)
    return channel


def _make(backend: Backend, device: torch.device) -> None:
    """Make a backend's communicator for a device, with all ranks, by its first use."""
    backend.allreduce([torch.zeros(1, device=device)]).wait()


def post(backend: Backend, sends: list[Message], recvs: list[Message]) -> list[dist.Work]:
    """Post messages at once, receives first; peers are ranks of the group.

    This is what `dist.batch_isend_irecv` does, in an eighth of its time.
    """
    coalesces = backend.supports_coalescing
    if coalesces:
        backend._start_coalescing()
    works = [backend.recv([tensor], peer, 0) for peer, tensor in recvs]
    works += [backend.send([tensor], peer, 0) for peer, tensor in sends]
    return [backend._end_coalescing()] if coalesces else works
