"""The facts about a GPU on which tables depend."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Attributes:
    name: the name of the model.
    major: the first number of the compute capability.
    processors: the number of multiprocessors.
    """

    name: str
    major: int
    processors: int


_known: dict[torch.device, Gpu] = {}


def gpu_of(device: torch.device) -> Gpu:
    """Return the facts about a GPU, read once per process."""
    if device not in _known:
        found = torch.cuda.get_device_properties(device)
        _known[device] = Gpu(found.name, found.major, found.multi_processor_count)
    return _known[device]


def assume(device: torch.device, gpu: Gpu) -> None:
    """Set the facts in a process that must not use the GPU, such as a worker of a DataLoader."""
    _known[device] = gpu
