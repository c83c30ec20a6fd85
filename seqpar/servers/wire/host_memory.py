"""Host memory for tensors that move between a GPU and the host.

Tensors of tasks move through pinned memory. A copy from or to other memory would go through a
buffer of the driver, and the host would wait for each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return an uninitialised CPU tensor, pinned if `pinned` and if pinned memory is available."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return torch.empty(shape, dtype=dtype, device="cpu")
