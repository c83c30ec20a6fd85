"""The protocol of all benchmarks: check answers, time fairly, and record the hardware.

Contenders are timed in interleaved rounds after their answers were checked, and medians reported. A
canary, a fixed piece of work, shows whether the machine was steady.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Group
from seqpar.core.hooks import hooks
from seqpar.costs.profile import harness
from seqpar.costs.profile.harness import (
    CORES,
    environment,
    median_time,
    progress,
    pyplot,
    quartiles,
    slug,
)

__all__ = [
    "CORES",
    "canary",
    "check_canary",
    "drift",
    "environment",
    "exposed",
    "median_time",
    "progress",
    "pyplot",
    "quartiles",
    "results_file",
    "worst_error",
    "write",
]

MAX_CANARY_DRIFT = 0.05  # relative change of the canary's time


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


def exposed(
    step: Callable[[], object],
    group: Group,
    sent_bytes: Callable[[], int],
    rounds: int,
    seconds_per_area: float | None = None,
) -> dict[str, object]:
    """Return the result of `seqpar.exposure` for a step, and the bytes that this rank sends in it.

    `sent_bytes()` is the number sent so far. With `seconds_per_area`, each computation becomes a
    sleep of that many seconds for each attending (query, key) pair of each query head.
    """
    before = sent_bytes()
    with hooks.set(replace_compute=lambda area: None):
        step()  # the first step also opens connections
    sent = sent_bytes() - before
    sleeping = nullcontext()
    if seconds_per_area is not None:
        sleeping = hooks.set(replace_compute=lambda area: time.sleep(area * seconds_per_area))
    with sleeping:
        return {**harness.exposed(step, group, rounds), "bytes": sent}


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
