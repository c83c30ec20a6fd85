"""Measure all points of a sweep: check results, measure costs, and time in interleaved rounds."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import torch

from seqpar.bench.results.results import Check, Row, SweepResults
from seqpar.bench.workers import links, reference
from seqpar.bench.workers.ranks import PointError, StartError, SweepRequest, Task
from seqpar.bench.workers.reference import CheckSums
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import DTYPES, Options, Workload
from seqpar.strategies.registry import attention_modules

MAX_PREFLIGHT_SECONDS = 600.0

_NO_FAULT = re.compile("refused|out of memory|it took|nothing to compare|.*memory is short")


def run(
    options: Options, results: SweepResults, ranks: SweepRequest, begin: Callable[[str], None]
) -> None:
    """Measure all points that the results lack, writing each step; `begin` announces rounds."""
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
    return len(options.workloads()) * (1 + options.rounds)


def preflight(most: int, results: SweepResults, ranks: SweepRequest) -> None:
    """Measure links, unless known; raise a ValueError if the results are from other devices."""
    try:
        places = ranks.ask(most, {"do": "device"}, MAX_PREFLIGHT_SECONDS)
        known = results.content["links"]
        if known is not None:
            results.check_places(known["places"], places)
            if known["places"] == places:
                return
        pairs = ranks.ask(most, {"do": "links"}, MAX_PREFLIGHT_SECONDS) if most > 1 else []
    except PointError as error:
        raise StartError(f"messages between ranks fail: {error}") from None
    results.content["links"] = links.report(places, pairs)
    results.write()


class Measured:
    """The measurements of one workload."""

    def __init__(
        self, workload: Workload, options: Options, results: SweepResults, ranks: SweepRequest
    ) -> None:
        self._workload = workload
        self._limit = options.limit
        self._results = results
        self._ranks = ranks

    def _ask(self, row: Row, name: str, action: str) -> list[Any] | None:
        """Return all ranks' answers; on failure, return None and record the reason in the row."""
        if row["failed"] is not None:
            return None
        task: Task = {"do": action, "workload": self._workload.as_dict(), "contender": name}
        remaining = self._limit - row["spent"]
        # Another contender may have crashed the ranks; their restart is not this one's time.
        self._ranks.ready(self._workload.ranks)
        start = time.monotonic()
        try:
            if remaining <= 0:
                raise PointError("it took too long", late=True)
            return self._ranks.ask(self._workload.ranks, task, remaining)
        except PointError as error:
            # The limit applies to all steps of the point together.
            row["failed"] = f"it took more than {self._limit:g} s" if error.late else str(error)
            return None
        finally:
            row["spent"] += time.monotonic() - start

    def check(self, row: Row, name: str, one: Row) -> None:
        """Compare the contender with fp64; the point fails if the results are wrong."""
        answers = self._ask(row, name, "check")
        if answers is not None:
            row["check"], row["failed"] = judge(
                self._workload, answers, one if name != ONE else None
            )
        self._results.write()

    def costs(self, row: Row, name: str) -> None:
        answers = self._ask(row, name, "costs")
        if answers is not None:
            row["costs"] = {
                "memory": [answer["memory"] for answer in answers],
                "bytes": [answer["bytes"] for answer in answers],
                "exposure": answers[0]["exposure"],
            }
        self._results.write()

    def turn(self, row: Row, name: str) -> None:
        answers = self._ask(row, name, "time")
        if answers is not None:
            row["seconds"].append(max(answers))
        self._results.write()


def judge(
    workload: Workload, answers: list[CheckSums], one: Row | None
) -> tuple[Check, str | None]:
    """Return a contender's errors, from the sums of all ranks, and a description of a fault.

    `one` is the row of one device, the reference; None: of one device, compared to PyTorch.
    """
    errors = reference.add([answer["errors"] for answer in answers])
    eager = reference.add([answer["eager"] for answer in answers])
    rms_errors = {name: error for name, (error, _) in errors.items()}
    if not math.isfinite(sum(rms_errors.values())):
        return {"errors": None, "relative": None}, "wrong, so it was not timed: it has NaN or inf"
    check: Check = {
        "errors": rms_errors,
        "relative": max(error / (size or 1.0) for error, size in errors.values()),
    }
    if workload.tokens < reference.MIN_TOKENS_FOR_RATIOS:
        eps = torch.finfo(DTYPES[workload.dtype]).eps
        rounding = {name: eps * max(1.0, size) for name, (_, size) in errors.items()}
        return check, reference.wrong(errors, rounding, reference.MAX_ROUNDINGS)
    if one is None:
        allowed = {name: error for name, (error, _) in eager.items()}
        return check, reference.wrong(errors, allowed, reference.MAX_KERNEL_ERROR_RATIO)
    if one["check"] is None or (one["failed"] or "").startswith("wrong"):
        return check, f"nothing to compare it with: one device failed: {one['failed']}"
    allowed = one["check"]["errors"] or {}
    check["of_one_device"] = max(errors[name][0] / (allowed[name] or 1.0) for name in allowed)
    reason = reference.wrong(errors, allowed, reference.MAX_ERROR_RATIO)
    if reason is None and "spot" in answers[0]:
        spot = reference.add([answer["spot"]["errors"] for answer in answers])
        plain = reference.add([answer["spot"]["eager"] for answer in answers])
        allowed = {name: error for name, (error, _) in plain.items()}
        reason = reference.wrong(
            spot, allowed, reference.MAX_ERROR_RATIO * reference.MAX_KERNEL_ERROR_RATIO
        )
        if reason is None:
            check["spot"] = spot["out"][0]
    return check, reason


def faulty(rows: list[Row]) -> bool:
    """Return whether one of our strategies, or one device, was wrong or crashed (not: refused)."""
    ours = (*attention_modules(), ONE)
    failed = [x["failed"] for x in rows if x["contender"] in ours and x["failed"] is not None]
    return any(not _NO_FAULT.match(reason) for reason in failed)
