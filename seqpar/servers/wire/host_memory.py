"""Allocates host memory for tensors that are copied to or from a GPU.

Pinned memory is used, because the host need not wait for copies between pinned memory and the GPU.
A copy from or to other memory goes through a buffer of the driver, and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return an uninitialised CPU tensor. With `pinned`, it is in pinned memory if possible."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return torch.empty(shape, dtype=dtype, device="cpu")
