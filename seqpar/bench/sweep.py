"""Measure the points of a sweep: check results, measure costs, and time steps in interleaved
rounds.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from seqpar.bench.results.results_file import Check, Row, SweepResults
from seqpar.bench.workers import links, oracle
from seqpar.bench.workers.oracle import CheckSums
from seqpar.bench.workers.ranks import PointError, RankProcesses, RankRequest, StartError
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import SweepOptions, Workload
from seqpar.core.options import DTYPES
from seqpar.strategies.registry import attention_modules

MAX_PREFLIGHT_SECONDS = 600.0

_NO_FAULT = re.compile("refused|out of memory|it took|nothing to compare|.*memory is short")


def run(
    options: SweepOptions, results: SweepResults, ranks: RankProcesses, begin: Callable[[str], None]
) -> None:
    """Measure the points that are not in the results yet. `begin` is called with a text for each
    round.
    """
    workloads = options.workloads()
    points = itertools.product(workloads, (ONE, *options.contenders))
    if any(results.lacks(*point, options.rounds) for point in points):
        preflight(max(options.ranks), results, ranks)
    for workload in workloads:
        names = [ONE, *options.contenders]
        rows = {name: results.row(workload, name) for name in names}
        begin(f"{workload}: check")
        measured = _Measured(workload, options.limit, results, ranks, rows)
        for action in ("check", "costs"):
            for name in names:
                if rows[name][action] is None:
                    measured.add(name, action)
        for i in range(options.rounds):
            begin(f"{workload}: round {i + 1}")
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                if len(rows[name]["seconds"]) <= i:
                    measured.add(name, "time")


def steps(options: SweepOptions) -> int:
    return len(options.workloads()) * (1 + options.rounds)


def preflight(most: int, results: SweepResults, ranks: RankProcesses) -> None:
    """Measure the links, unless they are known. Raises a ValueError if the results are from
    different devices.
    """
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


@dataclass(frozen=True)
class _Measured:
    """The measurements of one batch, with a row for each strategy or library that computes it."""

    workload: Workload
    limit: float
    results: SweepResults
    ranks: RankProcesses
    rows: dict[str, Row]

    def add(self, name: str, action: Literal["check", "costs", "time"]) -> None:
        """Measure the strategy or library `name` and write the results. Wrong results are recorded
        as a failure.
        """
        row, answers = self.rows[name], self._ask(name, action)
        if answers is None:
            pass
        elif action == "check":
            one = self.rows[ONE] if name != ONE else None
            row["check"], row["failed"] = judge(self.workload, answers, one)
        elif action == "costs":
            row["costs"] = {
                "memory": [answer["memory"] for answer in answers],
                "bytes": [answer["bytes"] for answer in answers],
                "exposure": answers[0]["exposure"],
            }
        else:
            row["seconds"].append(max(answers))
        self.results.write()

    def _ask(self, name: str, action: str) -> list[Any] | None:
        """Return the answers of all ranks to a request about the strategy or library `name`. If a
        rank fails, record the reason as its result, and return None.
        """
        row = self.rows[name]
        if row["failed"] is not None:
            return None
        request: RankRequest = {
            "do": action,
            "workload": self.workload.as_dict(),
            "contender": name,
        }
        remaining = self.limit - row["spent"]
        # Ranks that an earlier contender has crashed are restarted here, before this contender's
        # time begins.
        self.ranks.ready(self.workload.ranks)
        start = time.monotonic()
        try:
            if remaining <= 0:
                raise PointError("it took too long", late=True)
            return self.ranks.ask(self.workload.ranks, request, remaining)
        except PointError as error:
            # The limit applies to the sum of all steps of the point.
            row["failed"] = f"it took more than {self.limit:g} s" if error.late else str(error)
            return None
        finally:
            row["spent"] += time.monotonic() - start


def judge(
    workload: Workload, answers: list[CheckSums], one: Row | None
) -> tuple[Check, str | None]:
    """Return the errors of a contender, and a text that says which errors are too large, or None.

    A contender is a strategy, another library, or the kernel on one device. Each element of
    `answers` is the answer of one rank: the sums of the squared errors of the rank's results.

    `one` is the row of the contender "one device" in the results file. The errors are compared with
    the errors in this row. If `one` is None, the contender itself is "one device", and its errors
    are compared with the errors of PyTorch.
    """
    errors, sizes = oracle.add([answer["errors"] for answer in answers])
    eager, _ = oracle.add([answer["eager"] for answer in answers])
    if not math.isfinite(sum(errors.values())):
        return {"errors": None, "relative": None}, "wrong, so it was not timed: it has NaN or inf"
    relative = max(error / (sizes[name] or 1.0) for name, error in errors.items())
    check: Check = {"errors": errors, "relative": relative}
    if workload.tokens < oracle.MIN_TOKENS_FOR_RATIOS:
        eps = torch.finfo(DTYPES[workload.dtype]).eps
        rounding = {name: eps * max(1.0, size) for name, size in sizes.items()}
        return check, oracle.wrong(errors, rounding, oracle.MAX_ROUNDINGS)
    if one is None:
        return check, oracle.wrong(errors, eager, oracle.MAX_KERNEL_ERROR_RATIO)
    if one["check"] is None or (one["failed"] or "").startswith("wrong"):
        return check, f"nothing to compare it with: one device failed: {one['failed']}"
    allowed = one["check"]["errors"] or {}
    check["of_one_device"] = max(errors[name] / (allowed[name] or 1.0) for name in allowed)
    reason = oracle.wrong(errors, allowed, oracle.MAX_ERROR_RATIO)
    if reason is None and "spot" in answers[0]:
        spot, _ = oracle.add([answer["spot"]["errors"] for answer in answers])
        plain, _ = oracle.add([answer["spot"]["eager"] for answer in answers])
        ratio = oracle.MAX_ERROR_RATIO * oracle.MAX_KERNEL_ERROR_RATIO
        reason = oracle.wrong(spot, plain, ratio)
        if reason is None:
            check["spot"] = spot["out"]
    return check, reason


def faulty(rows: list[Row]) -> bool:
    """Return whether a strategy of seqpar, or "one device", was wrong or crashed. Refusals do not
    count.
    """
    ours = (*attention_modules(), ONE)
    failed = [x["failed"] for x in rows if x["contender"] in ours and x["failed"] is not None]
    return any(not _NO_FAULT.match(reason) for reason in failed)
