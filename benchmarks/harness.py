"""What every benchmark shares: where it ran, whether the machine was steady, and where its results go."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seqpar
from seqpar import tracing
from seqpar.comm import Comm

RESULTS = Path(__file__).parent / "results"
DRIFT_LIMIT = 0.05


def median_time(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def canary() -> float:
    """Seconds that a fixed piece of work takes now: if it drifts over a run, the machine had other things to do."""
    x = torch.randn(1024, 1024)
    median_time(lambda: x @ x, 400)  # until clocks and caches have settled
    return median_time(lambda: x @ x, 200)


def worst_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest RMS error of some tensors, over the RMS of what they should be."""
    pairs = [(x.double(), y.detach().double()) for x, y in zip(found, expected, strict=True)]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs)


def exposed(step: Callable[[], object], comm: Comm, rounds: int, seconds_per_area: float | None = None) -> dict[str, float]:
    """`seqpar.exposure` of a step, and the bytes that this rank sends in it; with `seconds_per_area` computes are sleeps."""
    before = comm.sent_bytes
    with tracing.compute_replaced(lambda area: None):
        step()  # connects
    sent = comm.sent_bytes - before
    slept = nullcontext() if seconds_per_area is None else tracing.compute_replaced(lambda a: time.sleep(a * seconds_per_area))
    with slept:
        found = seqpar.exposure(step, comm, rounds)
    return {**vars(found), "fraction": found.fraction, "bytes": sent}


class UnsteadyError(RuntimeError):
    """The canary drifted: the run's figures are worth nothing, and none are written."""


def check_canary(before: float, after: float) -> float:
    drift = abs(after / before - 1)
    if drift > DRIFT_LIMIT:
        raise UnsteadyError(
            f"the canary took {before * 1e3:.2f} ms before the run and {after * 1e3:.2f} ms after: {drift:.1%} apart"
        )
    return drift


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "cores": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")},
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def device_slug() -> str:
    """The device as the name of a folder."""
    name = f"{environment()['device']} {'' if torch.cuda.is_available() else f'{torch.get_num_threads()} cores'}"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def write(name: str, results: dict[str, Any]) -> Path:
    """results/<name>.json"""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return path
