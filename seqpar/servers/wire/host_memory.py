"""Host memory for tensors that are copied to or from a GPU.

The memory is pinned, so that the host does not wait for copies between this memory and a GPU. A
copy between unpinned memory and a GPU passes through a buffer of the driver, and the host waits.
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
