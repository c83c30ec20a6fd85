"""Measure the time that a server adds to a short task, stage by stage.

This process and a server compute a task alternately. Both record when a task reaches each stage, by
a clock that all processes of a machine share, so the stages add up to the whole time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks import harness
from benchmarks.servers.processes import LIMIT, check, connect, servers, task
from seqpar.servers.pool import connection
from seqpar.servers.server import worker
from seqpar.servers.server.compute import compute
from seqpar.servers.server.service import Service
from seqpar.servers.wire.payload import Payload
from seqpar.servers.wire.versions import Version

Row = dict[str, Any]
TOKENS = 128
TURNS = 50  # tasks per round, each computed here and by the server
# The stage that begins with a stamp of this name.
STAGES = {
    "submitted": "client: make the message",
    "packed": "client: wake its thread",
    "sending": "client: send, and the way there",
    "arrived": "server: read and check",
    "admitted": "server: wait for its turn",
    "computing": "server: compute",
    "computed": "server: make and send the answer, and the way back",
    "received": "client: read and check",
    "read": "client: wake the caller",
}
CLIENT = {
    "packed": (connection, "pack", False),
    "sending": (connection.ServerConnection, "start", True),
    "received": (Version, "read_reply", True),
    "read": (Payload, "tensors", False),
}
SERVER = {
    "arrived": (Version, "read_request", True),
    "admitted": (worker.Worker, "add", False),
    "computing": (worker, "compute", True),
    "computed": (worker, "compute", False),
}


class Stamps(dict[str, float]):
    """The times at which a task reached each stage, by the clock that all processes share."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def watch(self, places: dict[str, tuple[Any, str, bool]]) -> None:
        """Record calls of functions, before or after them."""
        for name, (owner, function, before) in places.items():
            original = getattr(owner, function)
            self._replaced.append((owner, function, original))
            setattr(owner, function, self._stamped(original, name, before))

    def restore(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _stamped(self, function: Callable[..., Any], name: str, before: bool) -> Any:
        def stamped(*arguments: Any) -> Any:
            if before:
                self[name] = time.perf_counter()
            result = function(*arguments)
            if not before:
                self[name] = time.perf_counter()
            return result

        return stamped


def report(pipe: Any) -> None:
    """Make a server tell its stamps of a task before each answer."""
    stamps = Stamps()
    stamps.watch(SERVER)
    reply = Service._reply

    async def told(*arguments: Any) -> None:
        pipe.send(dict(stamps))
        await reply(*arguments)

    Service._reply = told  # type: ignore[method-assign]


def measure(transport: str, rounds: int, begin: Callable[[str], None]) -> Row:
    """Return the seconds of a task here and on the server, their difference, and the stages."""
    request, cpu = task(TOKENS), torch.device("cpu")
    with servers(transport, [None, report]) as (plain, watched):
        with connect([plain.address], transport) as pool:
            here: list[float] = []
            there: list[float] = []
            check(pool, [request])
            for turn in range(rounds + 1):
                begin(f"{transport}: latency, round {turn} of {rounds}")
                found: list[tuple[float, float]] = []
                for _ in range(TURNS):
                    start = time.perf_counter()
                    compute([request], cpu)
                    middle = time.perf_counter()
                    pool.submit(request).result(LIMIT)
                    found.append((middle - start, time.perf_counter() - middle))
                if turn:  # the first round warms up
                    here.append(statistics.median(x for x, _ in found))
                    there.append(statistics.median(x for _, x in found))
        stamps = _stamps(watched, transport, rounds * TURNS)
    added = [y - x for x, y in zip(here, there, strict=True)]
    return {
        "transport": transport,
        "tokens": TOKENS,
        "here": statistics.median(here),
        "there": statistics.median(there),
        "added": statistics.median(added),
        "rounds": {"here": here, "there": there},
        "stages": _stages(stamps),
    }


def _stamps(watched: Any, transport: str, times: int) -> list[dict[str, float]]:
    """Return the stamps of `times` tasks on a watched server."""
    stamps, request, found = Stamps(), task(TOKENS), []
    stamps.watch(CLIENT)
    try:
        with connect([watched.address], transport) as pool:
            check(pool, [request])
            watched.hear()
            for _ in range(times):
                stamps["submitted"] = time.perf_counter()
                pool.submit(request).result(LIMIT)
                stamps["returned"] = time.perf_counter()
                found.append(dict(stamps) | watched.hear())
    finally:
        stamps.restore()
    return found


def _stages(stamps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each stage."""
    names = [*STAGES, "returned"]
    return {
        STAGES[first]: statistics.median(x[second] - x[first] for x in stamps)
        for first, second in pairwise(names)
    }


def table(rows: Sequence[Row]) -> str:
    names = [row["transport"] for row in rows]
    whole = [
        [row["transport"], *(f"{1e6 * row[name]:.0f}" for name in ("here", "there", "added"))]
        for row in rows
    ]
    parts = [
        [stage, *(f"{1e6 * row['stages'][stage]:.0f}" for row in rows)]
        for stage in rows[0]["stages"]
    ]
    head = ["transport", "here, µs", "there, µs", "added, µs"]
    stages = harness.table(["stage", *(f"{name}, µs" for name in names)], parts)
    return f"{harness.table(head, whole)}\n\n{stages}"


def plot(axis: Any, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        left = 0.0
        for j, (stage, seconds) in enumerate(row["stages"].items()):
            label = stage if i == 0 else None
            axis.barh(i, 1e6 * seconds, left=1e6 * left, color=f"C{j}", label=label)
            left += seconds
        axis.barh(i - 0.5, 1e6 * row["here"], 0.1, color="black", label=None if i else "here")
    axis.set_yticks(range(len(rows)), [row["transport"] for row in rows])
    axis.set(title=f"a task of {TOKENS} tokens", xlabel="µs")
    axis.legend(fontsize=6)
