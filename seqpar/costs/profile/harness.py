"""Time steps, check that the machine is steady, and write results with the hardware they ran on.

All benchmarks follow one protocol: answers are checked before anything is timed, contenders take
turns round after round, medians are reported, and a canary, a fixed piece of work, is timed before
and after.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.core.hooks import hooks
from seqpar.core.torch_private import cpu_has_matrix_units
from seqpar.tracing.exposure import exposure

CORES = len(os.sched_getaffinity(0))  # whatever threads a benchmark takes
MAX_CANARY_DRIFT = 0.05  # relative change of the canary's time


def median_time(function: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def canary() -> float:
    """Return the seconds that a fixed piece of work takes now.

    If they drift over a run, the machine had other things to do.
    """
    x = torch.randn(1024, 1024)
    median_time(lambda: x @ x, 400)  # until clocks and caches have settled
    return median_time(lambda: x @ x, 200)


def drift(before: float, after: float) -> float:
    """Return by how much the canary's seconds changed, as a fraction."""
    return abs(after / before - 1)


class UnsteadyError(SystemExit):
    """The canary drifted: the run's figures are worth nothing, so the program ends without them."""


def check_canary(before: float, after: float) -> float:
    """Return by how much the canary drifted, as a fraction; raise UnsteadyError if too much."""
    found = drift(before, after)
    if found > MAX_CANARY_DRIFT:
        raise UnsteadyError(
            f"refused: the canary took {before * 1e3:.2f} ms before and {after * 1e3:.2f} after, "
            f"{found:.1%} apart"
        )
    return found


def worst_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest RMS error of some tensors, over the RMS of what they should be."""
    pairs = [
        (x.detach().double(), y.detach().double()) for x, y in zip(found, expected, strict=True)
    ]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs)


def exposed(
    step: Callable[[], object],
    group: Any,
    sent_bytes: Callable[[], int],
    rounds: int,
    seconds_per_area: float | None = None,
) -> dict[str, Any]:
    """Return what `seqpar.exposure` finds of a step, and the bytes that this rank sends in it.

    `sent_bytes()` is what this rank has sent so far. With `seconds_per_area` each compute is
    replaced by a sleep of so many seconds for each (query, key) pair that sees each other and each
    query head.
    """
    before = sent_bytes()
    with hooks.set(replace_compute=lambda area: None):
        step()  # the first one also makes connections
    sent = sent_bytes() - before
    slept: Any = nullcontext()
    if seconds_per_area is not None:
        slept = hooks.set(replace_compute=lambda area: time.sleep(area * seconds_per_area))
    with slept:
        found = exposure(step, group, rounds)
    figures = ("total", "without_communication", "communication", "fraction")
    result = {figure: getattr(found, figure) for figure in figures}
    spread = quartiles(found.fractions)
    return result | {"spread": spread, "samples": found.rounds, "bytes": sent}


def quartiles(found: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of some figures, to say how far apart they are."""
    lower, upper = np.quantile(found, (0.25, 0.75)).tolist()
    return lower, upper


def environment() -> dict[str, Any]:
    """Return the hardware, the versions and the commit."""
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
    """Return seqpar's commit; nothing where it was installed without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    tracked = git("ls-files", Path(__file__).name)  # a user's repository may be around this folder
    return git("describe", "--always", "--dirty") if tracked else ""


def slug(name: str) -> str:
    """Return a name as that of a file or folder."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_slug() -> str:
    """Return the device as the name of a folder."""
    found = environment()
    name = found["device"]
    return slug(name if torch.cuda.is_available() else f"{name} {found['cores']} cores")


def results_file(folder: Path, name: str) -> Path:
    """Return where this device's results lie: <folder>/<device>/<name>.json."""
    return folder / device_slug() / f"{name}.json"


def write(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """Write results, and where they were made, to `results_file`; return it."""
    path = results_file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return path


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of `total` points and the time left; give a function to call as each begins.

    Where stderr is no terminal, each point is a line there.
    """
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
