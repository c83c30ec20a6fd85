"""Check log_decay, and bring it to a device, so that the host waits for no device from then on."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from seqpar.arguments import check_tensor
from seqpar.torch_private import version_of

# What `check_values` has read on a GPU, by identity and version.
_right: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


def check_decay(log_decay: Tensor | None, kv_heads: int, device: torch.device) -> None:
    """Raise unless log_decay is None, or a tensor of the right shape, dtype and device."""
    if log_decay is None:
        return
    check_tensor("log_decay", log_decay, device, or_cpu=True)
    shape, dtype = tuple(log_decay.shape), log_decay.dtype
    if shape != (kv_heads,) or dtype not in (torch.float32, torch.float64):
        expected = f"({kv_heads},), one a KV head, in fp32 or fp64"
        raise ValueError(f"log_decay must be {expected}, got {shape} of {dtype}")


def check_values(log_decay: Tensor) -> None:
    """Raise unless all values are finite and at most 0.

    On a GPU that makes the host wait, so it is done once for a tensor, until it is written to.
    """
    on_host = log_decay.device.type == "cpu"
    key = None if on_host or log_decay.is_inference() else (id(log_decay), version_of(log_decay))
    if key is not None and _right.get(key) is log_decay:
        return
    if not _are_right(log_decay):
        raise ValueError(f"log_decay must be finite and at most 0, got {log_decay.tolist()}")
    if key is not None:
        _right[key] = log_decay


def _are_right(log_decay: Tensor) -> bool:
    return log_decay.is_meta or bool(((log_decay <= 0) & log_decay.isfinite()).all())


def on_device(log_decay: Tensor, device: torch.device) -> Tensor:
    """Return log_decay in fp64, on the device: copied there once for the same values."""
    if log_decay.device == device:
        return log_decay.to(torch.float64)
    return _copy(tuple(log_decay.tolist()), device)


@lru_cache(maxsize=64)
def _copy(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)
