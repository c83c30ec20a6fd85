"""The measured device: its clock, its rates, and the handling of its failures."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HEAD_START = 4_000_000  # GPU cycles, about 2 ms, during which the host queues a call
START_AGAIN = os.EX_TEMPFAIL  # exit status: more work is left, which another process can continue


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call; on a GPU by its clock, without the host's time."""
    if not GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def device_rates() -> tuple[float, dict[torch.dtype, float]]:
    """Return bytes/s of a copy, counting both ways, and FLOP/s of a large product per dtype."""
    size, side = (2**30, 8192) if GPU else (2**27, 2048)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target, rates = torch.empty_like(source), {}
    copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(10))
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
        rates[dtype] = (
            2 * side**3 / statistics.median([seconds(lambda x=x, y=y: x @ y) for _ in range(8)][3:])
        )
    return 2 * size / copy, rates


def refusal(contender: str, error: Exception) -> dict[str, str]:
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"contender": contender, "refused": first[:200]}


def usable() -> bool:
    """Return whether the device still computes: some failures make it unusable in a process."""
    try:
        return bool(torch.ones(1, device=DEVICE).sum() == 1)
    except RuntimeError:
        return False
