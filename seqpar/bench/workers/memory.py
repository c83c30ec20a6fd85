"""Measure the peak memory of a step."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # this C library lacks malloc_trim
        return


def peak(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes by which a step raises the peak memory, results included.

    On a CPU, Linux counts the bytes of the process, within about 100 KiB; otherwise None.
    """
    release()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        del kept
        return torch.cuda.max_memory_allocated() - before
    try:
        _CLEAR.write_text("5")  # reset the peak
        resident = _kilobytes("VmRSS")
        kept = step()
        del kept
        return max(0, _kilobytes("VmHWM") - resident) * 1024
    except (OSError, KeyError):
        return None


def _kilobytes(name: str) -> int:
    lines = (line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(dict(lines)[name].split()[0])
