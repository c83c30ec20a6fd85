"""The protocol of all benchmarks: check results, time fairly, and record the hardware.

`run` is the main function of a program: it parses options, calls the program's `measure`, and
writes result files. `measure` checks the results, then times contenders in interleaved rounds
(`turns`), and reports medians. A canary, a fixed piece of work, shows whether the speed of the
machine was steady.
"""

import argparse
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from benchmarks import RESULTS
from seqpar.comm.messages.comm import Group
from seqpar.core.hooks import set_hooks
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
    "arguments_of",
    "canary",
    "check_canary",
    "check_error",
    "drift",
    "environment",
    "exposed",
    "median_time",
    "progress",
    "pyplot",
    "quartiles",
    "results_file",
    "run",
    "sleeping",
    "table",
    "turns",
    "worst_error",
    "write",
]

MAX_CANARY_DRIFT = 0.05  # relative change of the canary's time
Results = dict[str, Any]  # values that JSON can hold
# By flag, the default value; or the default, a help text and, if only some values are allowed,
# these values. If the default is a list, the option takes several values; False makes a switch.
Arguments = Mapping[str, Any]
T = TypeVar("T")


def arguments_of(doc: str | None, arguments: Arguments) -> Namespace:
    """Return the options of the command line. `doc` is the module's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, given in arguments.items():
        default, text, *known = given if isinstance(given, tuple) else (given, None)
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        several = isinstance(default, list)
        parser.add_argument(
            flag,
            default=default,
            help=text,
            type=type(default[0] if several else default),
            nargs="*" if several else None,
            choices=known[0] if known else None,
        )
    return parser.parse_args()


def run(
    name: str,
    doc: str | None,
    arguments: Arguments,
    measure: Callable[[Namespace], Results],
    draw: Callable[[Results, Path], None] | None = None,
    canary_is: Literal["checked", "recorded", "none"] = "checked",
) -> Results:
    """Run a program: measure, and write `results/<device>/<name>.json`, and its picture if drawn.

    If the canary drifts, the run is refused, or the drift is only recorded. Option --no-write
    writes nothing.
    """
    options = arguments_of(
        doc, {**arguments, "--no-write": (False, "only print: write no result files")}
    )
    before = canary() if canary_is != "none" else 0.0
    results = measure(options)
    if canary_is != "none":
        after = canary()
        change = check_canary(before, after) if canary_is == "checked" else drift(before, after)
        results["canary_drift"] = change
        print(f"the canary drifted by {change:.1%}")
    if not options.no_write:
        path = write(RESULTS, name, results)
        if draw is not None:
            draw(results, path.with_suffix(".png"))
    return results


def turns(contenders: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, contender) of interleaved rounds; each begins with a different contender."""
    everyone = list(contenders)
    for i in range(rounds):
        first = i % len(everyone)
        for contender in everyone[first:] + everyone[:first]:
            yield i, contender


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def canary() -> float:
    """Return the seconds of a fixed piece of work, which drift if the machine does other work.

    It uses all cores, also if the program has set another number of threads since the last call.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    x = torch.randn(1024, 1024)
    median_time(lambda: x @ x, 400)  # let clocks and caches settle
    seconds = median_time(lambda: x @ x, 200)
    torch.set_num_threads(threads)
    return seconds


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


def check_error(name: object, error: float, limit: float) -> None:
    """Exit if a contender's error is above the limit."""
    if not error <= limit:
        raise SystemExit(f"{name} has an error of {error:.1e}: no times were measured")


def worst_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest RMS error of some tensors, divided by the RMS of the expected tensors."""
    pairs = [
        (x.detach().double(), y.detach().double()) for x, y in zip(found, expected, strict=True)
    ]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs)


def sleeping(seconds_per_area: float | None) -> AbstractContextManager[None]:
    """Return a context in which computations sleep, if the seconds per pair are given.

    A computation sleeps that many seconds for each attending (query, key) pair of each query head.
    """
    if not seconds_per_area:
        return nullcontext()
    return set_hooks(replace_compute=lambda area: time.sleep(area * seconds_per_area))


def exposed(
    step: Callable[[], object],
    group: Group,
    sent_bytes: Callable[[], int],
    rounds: int,
    seconds_per_area: float | None = None,
) -> dict[str, object]:
    """Return the result of `seqpar.exposure` for a step, and the bytes that this rank sends in it.

    `sent_bytes()` returns the bytes sent so far. With `seconds_per_area`, computations are
    `sleeping`.
    """
    before = sent_bytes()
    with set_hooks(replace_compute=lambda area: None):
        step()  # the first step also opens connections
    sent = sent_bytes() - before
    with sleeping(seconds_per_area):
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
