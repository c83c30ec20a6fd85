"""Measure a pool's recovery from faults of servers, and the cost of slow servers.

Computes are sleeps here, since four servers cannot compute simultaneously on two cores.
"""

from __future__ import annotations

import functools
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.servers.processes import LIMIT, check, connect, servers, task
from seqpar.servers.server import worker
from seqpar.servers.server.compute import compute

Row = dict[str, Any]
TOKENS, DEPTH = 16, 4
REQUEST = 1.0  # seconds, the deadline of a request
DEADLINES = {"connect": 0.5, "request": REQUEST, "hedge": 20.0, "give_up": 40.0}
SECONDS, SLOWER = 0.01, 10  # of a task's compute; a slow server takes SLOWER times as long
STEP = 32  # tasks
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# The share of slow calls of one server of four.
SLOW = {"none": 0.0, "always": 1.0, "one call in 20": 0.05}


def sleep(slow: float, _: Any) -> None:
    """Replace this process's computes by sleeps, with this share of long ones."""
    chance = random.Random(0)

    def slept(requests: Any, device: Any) -> Any:
        factor = SLOWER if chance.random() < slow else 1
        time.sleep(SECONDS * factor * len(requests))
        return compute(requests, device)

    worker.compute = slept  # type: ignore[attr-defined]


def failover(transport: str, rounds: int, begin: Callable[[str], None]) -> list[Row]:
    """Return, for each fault of one of three servers, the lost tasks, and seconds to recover.

    Tasks are submitted all the time. Lost tasks are those that were tried again. The pool has
    recovered when all tasks from before the fault have been answered.
    """
    rows = []
    for fault, number in FAULTS.items():
        lost, recovery = [], []
        for turn in range(rounds):
            begin(f"{transport}: a server is {fault}, round {turn + 1} of {rounds}")
            found = _fault(transport, number)
            lost.append(found[0])
            recovery.append(found[1])
        row = {"fault": fault, "transport": transport, "in_flight": DEPTH}
        rows.append(row | {"lost": lost, "recovery": recovery, "deadline": REQUEST})
    return rows


def _fault(transport: str, number: signal.Signals) -> tuple[int, float]:
    request = task(TOKENS)
    with (
        servers(transport, [functools.partial(sleep, 0.0)] * 3) as found,
        connect(
            [x.address for x in found], transport, depth=DEPTH, deadlines=DEADLINES,
            hedge_quantile=1.0,
        ) as pool,
    ):  # fmt: skip
        for _ in range(3):
            check(pool, [request] * STEP)
        futures = [pool.submit(request) for _ in range(3 * STEP)]
        futures[STEP].result(LIMIT)
        before = pool.report().retried
        start = time.monotonic()
        found[0].signal(number)
        for future in futures:
            future.result(LIMIT)
        return pool.report().retried - before, time.monotonic() - start


def hedging(transport: str, steps: int, begin: Callable[[str], None]) -> list[Row]:
    """Return the seconds of steps on four servers, one of them slow, with and without hedging.

    A step submits all its tasks, then waits for all.
    """
    rows = []
    for often, slow in SLOW.items():
        begin(f"{transport}: one server of four is slow: {often}")
        request = task(TOKENS)
        changes = [functools.partial(sleep, slow if i == 0 else 0.0) for i in range(4)]
        with servers(transport, changes) as found:
            addresses = [x.address for x in found]
            with (
                connect(addresses, transport, depth=2) as hedged,
                connect(addresses, transport, depth=2, hedge_quantile=1.0) as plain,
            ):
                seconds: dict[str, list[float]] = {"hedged": [], "not hedged": []}
                for pool in (hedged, plain):
                    check(pool, [request] * STEP)
                for _ in range(steps):
                    for name, pool in (("hedged", hedged), ("not hedged", plain)):
                        start = time.perf_counter()
                        futures: list[Future[Any]] = [pool.submit(request) for _ in range(STEP)]
                        for future in futures:
                            future.result(LIMIT)
                        seconds[name].append(time.perf_counter() - start)
                again = hedged.report().hedged
        for name, times in seconds.items():
            median = statistics.median(times)
            p99 = float(np.quantile(times, 0.99))
            row = {"slow": often, "steps": name, "median": median, "p99": p99}
            row |= {"transport": transport, "p99_of_median": p99 / median, "seconds": times}
            rows.append(row | {"asked_again": again if name == "hedged" else 0})
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        times = [f"{1e3 * row[name]:.1f}" for name in ("median", "p99")]
        lines.append([row["slow"], row["steps"], *times, f"{row['p99_of_median']:.2f}"])
    head = ["one of four servers is slow", "steps", "median, ms", "p99, ms", "p99 / median"]
    return harness.table(head, lines)


def plot(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        times = np.sort(row["seconds"]) * 1e3
        dash = "-" if row["steps"] == "hedged" else ":"
        name = f"{row['slow']}, {row['steps']}"
        axis.plot(np.linspace(0, 100, times.size), times, dash, label=name)
    axis.set(title="steps, one of four servers 10 times slower", xlabel="percentile", ylabel="ms")
    axis.legend(fontsize=7)
