"""Check log_decay, and bring it to a device, so that the host waits for no device from then on."""

from __future__ import annotations

import math
from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from seqpar.core.torch_private import version_of

# What `check_values` has read on a GPU, by identity and version.
_right: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


def check_values(log_decay: Tensor) -> None:
    """Raise unless all values are finite and at most 0.

    On a GPU that makes the host wait, so it is done once for a tensor, until it is written to.
    """
    if log_decay.is_meta:
        return
    if log_decay.device.type == "cpu" or log_decay.is_inference():  # which has no version
        _check(*log_decay.tolist())
    elif _right.get(key := (id(log_decay), version_of(log_decay))) is not log_decay:
        _check(*log_decay.tolist())
        _right[key] = log_decay


def on_device(log_decay: Tensor, device: torch.device) -> Tensor:
    """Return log_decay in fp64 on the device; the same values are copied there once."""
    if log_decay.device.type == "cpu":
        return _copy(device, *log_decay.tolist())
    return log_decay.to(torch.float64)


@lru_cache(maxsize=64)
def _check(*values: float) -> None:
    if not all(-math.inf < value <= 0 for value in values):
        raise ValueError(f"log_decay must be finite and at most 0, got {list(values)}")


@lru_cache(maxsize=64)
def _copy(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)
