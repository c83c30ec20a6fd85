"""Measure all points of a sweep: check them, weigh them, and let contenders take turns."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import torch

from seqpar.bench.results.results import SweepResults
from seqpar.bench.workers import links, reference
from seqpar.bench.workers.ranks import PointError, StartError, SweepRequest
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import DTYPES, Options, Workload
from seqpar.strategies.registry import attention_modules

MAX_PREFLIGHT_SECONDS = 600.0

_TOO_MUCH = re.compile("refused|out of memory|it took|nothing to compare|.*memory is short")


def run(
    options: Options, results: SweepResults, ranks: SweepRequest, begin: Callable[[str], None]
) -> None:
    """Measure what the results lack; they are written after each point's every step.

    `begin` is called as each round of a workload begins. A point that fails has its reason in
    `failed`, and the sweep goes on.
    """
    workloads = options.workloads()
    points = itertools.product(workloads, (ONE, *options.contenders))
    if any(results.lacks(*point, options.rounds) for point in points):
        preflight(max(options.ranks), results, ranks)
    for workload in workloads:
        names = [ONE, *options.contenders]
        rows = {name: results.row(workload, name) for name in names}
        begin(f"{workload}: check")
        measure = Measured(workload, options, results, ranks)
        for name, row in rows.items():
            if row["check"] is None:
                measure.check(row, name, rows[ONE])
        for name, row in rows.items():
            if row["costs"] is None:
                measure.costs(row, name)
        for i in range(options.rounds):
            begin(f"{workload}: round {i + 1}")
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                if len(rows[name]["seconds"]) <= i:
                    measure.turn(rows[name], name)


def steps(options: Options) -> int:
    """Return how often `run` calls `begin`."""
    return len(options.workloads()) * (1 + options.rounds)


def preflight(most: int, results: SweepResults, ranks: SweepRequest) -> None:
    """Measure the links between ranks, if they have not been on these hosts.

    Raise a ValueError if the results are of other devices, or of other numbers of them on a host.
    """
    try:
        places = ranks.ask(most, {"do": "device"}, MAX_PREFLIGHT_SECONDS)
        known = results.found["links"]
        if known is not None:
            results.check_places(known["places"], places)
            if known["places"] == places:
                return
        found = ranks.ask(most, {"do": "links"}, MAX_PREFLIGHT_SECONDS) if most > 1 else []
    except PointError as error:
        raise StartError(f"messages between ranks fail: {error}") from None
    results.found["links"] = links.report(places, found)
    results.write()


class Measured:
    """What is measured of one workload."""

    def __init__(
        self, workload: Workload, options: Options, results: SweepResults, ranks: SweepRequest
    ) -> None:
        self._workload, self._limit = workload, options.limit
        self._results, self._ranks = results, ranks

    def _ask(self, row: dict[str, Any], name: str, what: str) -> list[Any] | None:
        """Return all ranks' answers, or None and why in the row."""
        if row["failed"] is not None:
            return None
        task = {"do": what, "workload": self._workload.as_dict(), "contender": name}
        left = self._limit - row["spent"]
        self._ranks.ready(self._workload.ranks)  # who made them start anew was another contender
        start = time.monotonic()
        try:
            if left <= 0:
                raise PointError("it took too long", late=True)
            return self._ranks.ask(self._workload.ranks, task, left)
        except PointError as error:
            late = error.late  # of a point's steps, a limit is that of all
            row["failed"] = f"it took more than {self._limit:g} s" if late else str(error)
            return None
        finally:
            row["spent"] += time.monotonic() - start

    def check(self, row: dict[str, Any], name: str, one: dict[str, Any]) -> None:
        """Compare the contender with fp64, and fail it if it is wrong."""
        answers = self._ask(row, name, "check")
        if answers is not None:
            row["check"], row["failed"] = judge(
                self._workload, answers, one if name != ONE else None
            )
        self._results.write()

    def costs(self, row: dict[str, Any], name: str) -> None:
        """Measure memory, bytes and what is exposed."""
        answers = self._ask(row, name, "costs")
        if answers is not None:
            names = ("memory", "bytes")
            row["costs"] = {x: [answer[x] for answer in answers] for x in names}
            row["costs"]["exposure"] = answers[0]["exposure"]
        self._results.write()

    def turn(self, row: dict[str, Any], name: str) -> None:
        """Time one step; its seconds are those of the slowest rank."""
        answers = self._ask(row, name, "time")
        if answers is not None:
            row["seconds"].append(max(answers))
        self._results.write()


def judge(
    workload: Workload, answers: list[dict[str, Any]], one: dict[str, Any] | None
) -> tuple[dict[str, Any], str | None]:
    """Return the errors of a contender, from all ranks' sums, and what is wrong with them or None.

    `one` is the row of one device, which a contender is compared with; None for itself, which is
    compared with plain PyTorch.
    """
    errors = reference.add([answer["errors"] for answer in answers])
    eager = reference.add([answer["eager"] for answer in answers])
    found: dict[str, Any] = {"errors": {name: error for name, (error, _) in errors.items()}}
    found["relative"] = max(error / (size or 1.0) for error, size in errors.values())
    if not math.isfinite(sum(found["errors"].values())):
        return {"errors": None, "relative": None}, "wrong, so it was not timed: it has NaN or inf"
    if workload.tokens < reference.MIN_TOKENS_FOR_RATIOS:
        eps = torch.finfo(DTYPES[workload.dtype]).eps
        rounding = {name: eps * max(1.0, size) for name, (_, size) in errors.items()}
        return found, reference.wrong(errors, rounding, reference.MAX_ROUNDINGS)
    if one is None:
        allowed = {name: error for name, (error, _) in eager.items()}
        return found, reference.wrong(errors, allowed, reference.MAX_KERNEL_ERROR_RATIO)
    if one["check"] is None or (one["failed"] or "").startswith("wrong"):
        return found, f"nothing to compare it with: one device failed: {one['failed']}"
    allowed = one["check"]["errors"]
    found["of_one_device"] = max(errors[name][0] / (allowed[name] or 1.0) for name in allowed)
    reason = reference.wrong(errors, allowed, reference.MAX_ERROR_RATIO)
    if reason is None and "spot" in answers[0]:
        spot, plain = (
            reference.add([answer["spot"][part] for answer in answers])
            for part in ("errors", "eager")
        )
        allowed = {name: error for name, (error, _) in plain.items()}
        reason = reference.wrong(
            spot, allowed, reference.MAX_ERROR_RATIO * reference.MAX_KERNEL_ERROR_RATIO
        )
        if reason is None:
            found["spot"] = spot["out"][0]
    return found, reason


def faulty(rows: list[dict[str, Any]]) -> bool:
    """Return whether one of our strategies, or one device, was wrong or broke.

    It may refuse a workload, and memory and time may be too short for it.
    """
    ours = (*attention_modules(), ONE)
    failed = [x["failed"] for x in rows if x["contender"] in ours and x["failed"] is not None]
    return any(not _TOO_MUCH.match(reason) for reason in failed)
