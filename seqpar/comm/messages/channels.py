"""Make NCCL communicators for a group, so that messages need not wait for each other.

A communicator runs its exchanges one after another, in the order in which they are posted. Two
series of messages that must not wait for each other therefore use different communicators. An
example is messages to the next rank and messages to the previous rank. Communicators use CUDA
streams with high priority, so that an attention kernel cannot delay a message.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from seqpar.comm.messages.message_header import Message
from seqpar.core.torch_private import (
    backend_of,
    copy_options,
    end_coalescing,
    group_of,
    start_coalescing,
)


class Communicators:
    """The NCCL communicators of a process group, which all Comms of the group share."""

    def __init__(self) -> None:
        # For each type of device, the device from which the group sends.
        self._devices: dict[str, torch.device] = {}
        # If not None, it is used on a GPU instead of the group's own communicator.
        self._urgent: ProcessGroup | None = None
        self._channels: dict[str, ProcessGroup | None] = {}
        self._coalesces: dict[str, bool] = {}  # by type of device

    def gpu(self, group: ProcessGroup) -> torch.device | None:
        """Return the GPU from which the group sends.

        This is the first GPU for which `join` was called. Before the first call of `join`, it is
        the GPU to which the group is bound.
        """
        return self._devices.get("cuda", group.bound_device_id)

    def expected(self, group: ProcessGroup, device: torch.device) -> str | None:
        """Return None if the group can send from `device`. If it cannot, return a text that names
        the devices from which the group can send.
        """
        if group.size() == 1 or device.type == "meta":
            return None  # a call on this device sends nothing
        if device.type not in self._devices:
            config = dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
            backends = dict(pair.split(":") for pair in config.split(","))
            if backends.get(device.type, "gloo") == "gloo":  # gloo sends only from the CPU
                return f"a device that the group's backend ({config}) sends from"
        gpu = self.gpu(group)
        if device.type == "cuda" and gpu not in (None, device):
            return f"{gpu}, from which the group sends"
        return None

    def join(self, group: ProcessGroup, device: torch.device) -> None:
        """Make the communicator for tensors on a device. All ranks must make the first call
        together.

        If the communicator that torch made for the group has a stream of normal priority, the first
        call makes a new communicator.
        """
        if device.type not in self._devices:
            self._devices[device.type] = device
            if group.size() == 1:
                return
            own = _nccl_of(group, device)
            if own is not None and not own.options.is_high_priority_stream:
                self._urgent = _open(group, "messages", device)
            if self.carrier(group, device) is group:
                _use(group, device)

    def carrier(self, group: ProcessGroup, device: torch.device) -> ProcessGroup:
        return self._urgent if self._urgent is not None and device.type == "cuda" else group

    def coalesces(self, group: ProcessGroup, device: torch.device) -> bool:
        if (known := self._coalesces.get(device.type)) is None:
            known = self._coalesces[device.type] = backend_of(group, device).supports_coalescing
        return known

    def channel(self, group: ProcessGroup, name: str) -> ProcessGroup | None:
        """Return the further communicator with this name. The first call with a name makes it.

        All ranks must make the first call together.

        If the group is not on NCCL, or if `join` was not called for a GPU, the result is None, and
        all messages use one communicator.
        """
        device = self._devices.get("cuda")
        if device is None or group.size() == 1:
            return None
        if name not in self._channels:
            self._channels[name] = _open(group, name, device)
        return self._channels[name]


def _open(group: ProcessGroup, name: str, device: torch.device) -> ProcessGroup | None:
    """Make a communicator over the ranks of a group, without registering a group in torch."""
    own = _nccl_of(group, device)
    if own is None:
        return None
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    copy_options(own, options)
    # `dist.new_group` cannot be used. If the default group is bound to a device, `new_group` splits
    # the communicator of the default group, so all ranks of the default group would take part.
    options.group_name = f"{group.group_name}/{name}"
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    prefix = f"seqpar/{options.group_name}/"
    store = dist.PrefixStore(prefix, group.get_group_store())  # type: ignore[attr-defined]
    backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    channel: ProcessGroup = group_of(backend, store, device)
    _use(channel, device)
    # It is not shut down at exit, because the shutdown could wait for messages that never arrive.
    weakref.finalize(group, channel.shutdown).atexit = False
    return channel


def _nccl_of(group: ProcessGroup, device: torch.device) -> dist.ProcessGroupNCCL | None:
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    own = backend_of(group, device)
    return own if isinstance(own, dist.ProcessGroupNCCL) else None


def _use(group: ProcessGroup, device: torch.device) -> None:
    group.allreduce([torch.zeros(1, device=device)]).wait()


def post(
    group: ProcessGroup,
    device: torch.device,
    sends: list[Message],
    recvs: list[Message],
    order: Sequence[int],
    coalesced: bool,
) -> list[dist.Work]:
    """Post messages, and return the handles to wait for.

    `order` maps each peer to its rank in the process group. Receives are posted before sends. If
    `coalesced` is True, all messages become a single operation, as with `dist.batch_isend_irecv`.
    """
    if coalesced:
        start_coalescing(group, device)
    works = []
    for peer, tensor in recvs:
        works.append(group.recv([tensor], order[peer], 0))
    for peer, tensor in sends:
        works.append(group.send([tensor], order[peer], 0))
    return [end_coalescing(group, device)] if coalesced else works
