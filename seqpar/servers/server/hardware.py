"""What a process computes on, as far as the bits of results depend on it."""

from __future__ import annotations

import torch


def hardware_of(device: torch.device) -> str:
    """Return a description: processes of which it is the same give the same bits.

    On a CPU the number of threads belongs to it: MKL's matrix products depend on it, unless
    MKL_CBWR makes them reproducible.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{device.type} with {capability} and {threads} thread{'s' * (threads > 1)}"
