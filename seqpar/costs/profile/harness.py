"""The protocol of all benchmarks: check answers, time fairly, and record the hardware.

Contenders are timed in interleaved rounds after their answers were checked, and medians reported. A
canary, a fixed piece of work, shows whether the machine was steady.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Group
from seqpar.core.hooks import hooks
from seqpar.core.torch_private import cpu_has_matrix_units
from seqpar.tracing.exposure import exposure

CORES = len(os.sched_getaffinity(0))  # regardless of the threads that a benchmark uses
MAX_CANARY_DRIFT = 0.05  # relative change of the canary's time


def median_time(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def canary() -> float:
    """Return the seconds of a fixed piece of work, which drift if the machine does other work."""
    x = torch.randn(1024, 1024)
    median_time(lambda: x @ x, 400)  # let clocks and caches settle
    return median_time(lambda: x @ x, 200)


def drift(before: float, after: float) -> float:
    return abs(after / before - 1)


class UnsteadyError(SystemExit):
    """The canary drifted: the program ends without results."""


def check_canary(before: float, after: float) -> float:
    change = drift(before, after)
    if change > MAX_CANARY_DRIFT:
        raise UnsteadyError(
            f"refused: the canary took {before * 1e3:.2f} ms before and {after * 1e3:.2f} after, "
            f"{change:.1%} apart"
        )
    return change


def worst_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest RMS error of some tensors relative to the RMS of the expected ones."""
    pairs = [
        (x.detach().double(), y.detach().double()) for x, y in zip(found, expected, strict=True)
    ]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs)


class ExposedCommunication(TypedDict, total=False):
    """The seconds of a step, with and without communication; `bytes` are sent by this rank."""

    total: float
    without_communication: float
    communication: float
    fraction: float
    spread: tuple[float, float]
    samples: tuple[tuple[float, float, float], ...]  # of each round, in the order of the totals
    bytes: int


def exposed(
    step: Callable[[], object],
    group: Group,
    sent_bytes: Callable[[], int],
    rounds: int,
    seconds_per_area: float | None = None,
) -> ExposedCommunication:
    """Return the result of `seqpar.exposure` for a step, and the bytes that this rank sends in it.

    `sent_bytes()` is the number sent so far. With `seconds_per_area`, each computation becomes a
    sleep of that many seconds for each attending (query, key) pair of each query head.
    """
    before = sent_bytes()
    with hooks.set(replace_compute=lambda area: None):
        step()  # the first step also opens connections
    sent = sent_bytes() - before
    sleeping: AbstractContextManager[object] = nullcontext()
    if seconds_per_area is not None:
        sleeping = hooks.set(replace_compute=lambda area: time.sleep(area * seconds_per_area))
    with sleeping:
        measured = exposure(step, group, rounds)
    return {
        "total": measured.total,
        "without_communication": measured.without_communication,
        "communication": measured.communication,
        "fraction": measured.fraction,
        "spread": quartiles(measured.fractions),
        "samples": measured.rounds,
        "bytes": sent,
    }


def quartiles(figures: Sequence[float]) -> tuple[float, float]:
    lower, upper = np.quantile(figures, (0.25, 0.75)).tolist()
    return lower, upper


class Environment(TypedDict):
    """The hardware and software of a measurement."""

    cpu: str
    device: str
    cores: int
    capability: str
    matrix_units: bool
    python: str
    versions: dict[str, str | None]
    commit: str
    date: str


def environment() -> Environment:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {
        "cpu": cpu,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "cores": CORES,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "matrix_units": cpu_has_matrix_units(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")
        },
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    """Return seqpar's commit, or "" if it was installed without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # git is not installed
            return ""
        return done.stdout.strip()

    # This folder may lie, untracked, inside a user's repository.
    tracked = git("ls-files", Path(__file__).name)
    return git("describe", "--always", "--dirty") if tracked else ""


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_slug() -> str:
    here = environment()
    name = here["device"]
    return slug(name if torch.cuda.is_available() else f"{name} {here['cores']} cores")


def results_file(folder: Path, name: str) -> Path:
    """Return the path of this device's results: <folder>/<device>/<name>.json."""
    return folder / device_slug() / f"{name}.json"


def write(folder: Path, name: str, results: Mapping[str, object]) -> Path:
    path = results_file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return path


def pyplot() -> ModuleType:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar, or lines, for `total` points; yield the function that begins a point."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    columns = (BarColumn(), MofNCompleteColumn(), left, text)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1
            if not console.is_terminal:
                console.print(f"{begun} of {total}: {what}", soft_wrap=True)

        yield begin
