"""Measure what a step holds at most."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def release() -> None:
    """Give memory that nobody uses back to the device or the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without it keeps what it has
        return


def peak(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes that a step holds at most beside what is there before, results included.

    On a GPU they are those of torch's allocator, on a CPU those of the process, as Linux counts
    them: to some 100 KiB; None where it does not.
    """
    release()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        del kept
        return torch.cuda.max_memory_allocated() - before
    try:
        _CLEAR.write_text("5")  # the peak counts anew from here
        resident = _kilobytes("VmRSS")
        kept = step()
        del kept
        return max(0, _kilobytes("VmHWM") - resident) * 1024
    except (OSError, KeyError):
        return None


def _kilobytes(name: str) -> int:
    lines = (line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(dict(lines)[name].split()[0])
