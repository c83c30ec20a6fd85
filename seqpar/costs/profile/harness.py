"""Common code of measurements: samples, profiles, hardware, medians, plots and progress."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal, TypedDict

import numpy as np
import torch

from seqpar.comm.messages.comm import Group
from seqpar.core.torch_private import cpu_has_matrix_units
from seqpar.tracing.exposure import exposure

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
CORES = len(os.sched_getaffinity(0))  # all cores, even if a benchmark uses fewer threads


def median_time(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class ExposedCommunication(TypedDict):
    """The seconds of a step with and without communication, which `seqpar.exposure` returns."""

    total: float
    without_communication: float
    communication: float
    fraction: float
    spread: tuple[float, float]
    # For each round, the seconds in the order of the fields above.
    samples: tuple[tuple[float, float, float], ...]


def exposed(step: Callable[[], object], group: Group, rounds: int) -> ExposedCommunication:
    measured = exposure(step, group, rounds)
    return {
        "total": measured.total,
        "without_communication": measured.without_communication,
        "communication": measured.communication,
        "fraction": measured.fraction,
        "spread": quartiles(measured.fractions),
        "samples": measured.rounds,
    }


def quartiles(figures: Sequence[float]) -> tuple[float, float]:
    lower, upper = np.quantile(figures, (0.25, 0.75)).tolist()
    return lower, upper


class Sample(TypedDict, total=False):
    """A timed call: its kind, its shape and the measured seconds."""

    kind: str  # "full", "causal" and "window" (softmax attention), "linear" or "modules"
    rows: int
    keys: int
    documents: int
    window: int | None
    heads: int
    flops: float  # of a forward
    forward: list[float]
    backward: list[float]


class Profile(TypedDict):
    """A measured machine: its hardware, and samples of the work of one rank."""

    environment: Mapping[str, object]
    device: str
    devices: int
    memory: int
    dtype: str
    heads: int
    head_dim: int
    backend: str
    fused: bool
    rates: dict[str, list[float]]
    samples: list[Sample]
    held_out: list[Sample]


class Environment(TypedDict):
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
    """Return the commit of seqpar's source, or "" if it was installed without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # raised if git is not installed
            return ""
        return done.stdout.strip()

    # This folder can be an untracked folder inside a user's repository.
    tracked = git("ls-files", Path(__file__).name)
    if not tracked:
        return ""
    commit, root = git("describe", "--always", "--dirty"), Path(__file__).parents[3]
    code = [str(root / folder) for folder in ("seqpar", "triton_kernels")]
    listed = git("ls-files", "--full-name", "-o", "--exclude-standard", "--", *code)
    changes = git("diff", "HEAD", "--", *code).encode()
    changes += b"".join((root / name).read_bytes() for name in listed.splitlines())
    # Uncommitted changes are part of the name, so that results of changed code are not added to
    # results of the commit.
    return f"{commit}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def pyplot() -> ModuleType:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show progress over `total` points. Yields a function to be called with the name of each new
    point.
    """
    from rich import progress as bars
    from rich.console import Console

    text, left = bars.TextColumn("{task.description}"), bars.TimeRemainingColumn()
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), left, text)
    console = Console(stderr=True)
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1
            if not console.is_terminal:
                console.print(f"{begun} of {total}: {what}", soft_wrap=True)

        yield begin
