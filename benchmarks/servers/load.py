"""Measure a server under load from 1, 4 and 32 clients: throughput, busy time and memory."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.servers.processes import LIMIT, Peer, Server, check, connect, servers, task
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.wire.request import Request

Row = dict[str, Any]
CLIENTS = [1, 4, 32]
TOKENS, DEPTH = 512, 4  # tokens of a task; tasks that each client has in flight
FEW = 100  # requests before the first measurement of memory
SHAPES = [16, 24, 32, 48, 64, 96, 128]  # tokens of those requests
_PAUSE = 0.5  # seconds from the start message until tasks are counted


def throughput(
    transport: str, rounds: int, seconds: float, begin: Callable[[str], None]
) -> list[Row]:
    """Return, for each number of clients, tasks per second, and the server's share of computing.

    All clients are connected from the start; only the current number of them submits.
    """
    with servers(transport) as (server,), ExitStack() as stack:
        clients = [
            stack.enter_context(Peer(_client, server.address, transport, i))
            for i in range(max(CLIENTS))
        ]
        for client in clients:
            client.hear()
        found: dict[int, list[Row]] = {count: [] for count in CLIENTS}
        for turn, count in harness.turns(CLIENTS, rounds):
            begin(f"{transport}: {count} clients, round {turn + 1} of {rounds}")
            found[count].append(_turn(server, clients[:count], seconds))
    one = statistics.median(sum(x["tasks"]) for x in found[1])
    rows = []
    for count, turns in found.items():
        together = statistics.median(sum(x["tasks"]) for x in turns)
        row = {
            "clients": count,
            "transport": transport,
            "tasks_per_second": together / seconds,
            "of_one": together / one,
            "least_of_mean": min(_fairness(x["tasks"]) for x in turns),
            "busy": statistics.median(x["busy"] for x in turns),
        }
        rows.append(row | {"turns": turns})
    return rows


def _fairness(tasks: Sequence[int]) -> float:
    """Return the fewest tasks of a client over the mean."""
    return min(tasks) / max(1.0, statistics.mean(tasks))


def _turn(server: Server, clients: Sequence[Peer], seconds: float) -> Row:
    """Run clients for this time. Returns each client's number of answered tasks."""
    start = time.monotonic() + _PAUSE
    for client in clients:
        client.pipe.send((start, start + seconds))
    time.sleep(_PAUSE)
    before = server.status()
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    after = server.status()
    busy = (after.busy_seconds - before.busy_seconds) / (after.seconds - before.seconds)
    return {"tasks": [client.hear() for client in clients], "busy": busy}


def _client(pipe: Any, address: str, transport: str, seed: int) -> None:
    """Submit tasks on request, and send the number of answers in that time."""
    request = task(TOKENS, seed)
    with connect([address], transport, depth=DEPTH) as pool:
        check(pool, [request])
        pipe.send("ready")
        while True:
            start, stop = pipe.recv()
            count = 0
            for answered in _answers(pool, request, stop):
                count += start <= answered < stop
            pipe.send(count)


def _answers(pool: ServerPool, request: Request, stop: float) -> Iterator[float]:
    """Keep tasks in flight until a time. Yields the time of each answer."""
    flying = deque(pool.submit(request) for _ in range(DEPTH))
    while flying:
        flying.popleft().result(LIMIT)
        now = time.monotonic()
        if now < stop:
            flying.append(pool.submit(request))
        yield now


def memory(transport: str, many: int, begin: Callable[[str], None]) -> Row:
    """Return a server's resident bytes after few requests, of several shapes, and after many."""
    requests = [task(tokens, tokens) for tokens in SHAPES]
    with servers(transport) as (server,), connect([server.address], transport) as pool:
        begin(f"{transport}: memory after {FEW} requests")
        check(pool, requests)
        _ask(pool, requests, FEW - len(requests))
        few = _resident(server)
        begin(f"{transport}: memory after {many} requests")
        _ask(pool, requests, many - FEW)
        bytes_of = {"few": few, "many": _resident(server)}
    grown = bytes_of["many"] / few - 1
    return {"transport": transport, "requests": many, "bytes": bytes_of, "grown": grown}


def _ask(pool: ServerPool, requests: Sequence[Request], count: int) -> None:
    flying: deque[Any] = deque()
    for i in range(count):
        flying.append(pool.submit(requests[i % len(requests)]))
        if len(flying) == 2 * DEPTH:
            flying.popleft().result(LIMIT)
    for future in flying:
        future.result(LIMIT)


def _resident(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (found,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return found


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row["transport"], str(row["clients"]), f"{row['tasks_per_second']:.1f}"]
        lines.append([*cells, *(f"{row[x]:.3f}" for x in ("of_one", "least_of_mean", "busy"))])
    head = ["transport", "clients", "tasks a second", "of one client's", "least of mean", "busy"]
    return harness.table(head, lines)


def plot(axis: Any, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row["transport"] for row in rows):
        some = [row for row in rows if row["transport"] == name]
        places = range(len(some))
        axis.plot(places, [row["of_one"] for row in some], "o-", label=f"{name}: over one client")
        axis.plot(places, [row["least_of_mean"] for row in some], "s--", label=f"{name}: fairness")
        axis.plot(places, [row["busy"] for row in some], "^:", label=f"{name}: busy")
    axis.set_xticks(range(len(CLIENTS)), [str(x) for x in CLIENTS])
    axis.axhline(0.9, color="0.7", lw=1)
    axis.set(title="one server under load", xlabel="clients", ylim=(0, None))
    axis.legend(fontsize=7)
