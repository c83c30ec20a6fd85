"""The numbers that a server reports, listed once.

`COUNTERS` describes each number of a `Status` message: how the metrics page explains it, its
column in the table of `python -m seqpar status`, and its place in the live line of
`python -m seqpar serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from seqpar.servers.wire.protocol import Status

GIGABYTE = 1e9
Text = Callable[[Status], str]


@dataclass
class Totals:
    """Totals since the server's start, which are fields of `Status`.

    Attributes:
        tasks: tasks and steps that were computed and sent.
        tokens: their query rows.
        bytes: of their payloads and results.
        refused: requests that were malformed, above a cap, too late, or met a full server.
    """

    tasks: int = 0
    tokens: int = 0
    bytes: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Counter:
    """One number that a server reports.

    Attributes:
        name: the field of `Status`, and with the prefix `seqpar_` the name on the metrics page.
        help: its explanation on the metrics page.
        grows: whether it only grows.
        heading, cell: its column in the table of `status`, from a status since the server's start.
        live: its text in the live line, from a status over the last moment.
    """

    name: str
    help: str
    grows: bool = False
    heading: str = ""
    cell: Text | None = None
    live: Text | None = None


def _per_second(amount: float, status: Status) -> float:
    return amount / max(status.seconds, 1e-9)


COUNTERS = (
    Counter(
        "clients",
        "clients with a lease",
        heading="clients",
        cell=lambda x: str(x.clients),
        live=lambda x: f"{x.clients} clients",
    ),
    Counter(
        "tasks",
        "tasks computed",
        grows=True,
        heading="tasks",
        cell=lambda x: str(x.tasks),
        live=lambda x: f"{_per_second(x.tasks, x):,.0f} tasks/s",
    ),
    Counter(
        "tokens",
        "query rows of these tasks",
        grows=True,
        heading="tokens",
        cell=lambda x: str(x.tokens),
        live=lambda x: f"{_per_second(x.tokens, x):,.0f} tokens/s",
    ),
    Counter(
        "bytes",
        "bytes of their payloads and results",
        grows=True,
        heading="GB",
        cell=lambda x: f"{x.bytes / GIGABYTE:.2f}",
        live=lambda x: f"{_per_second(x.bytes / GIGABYTE, x):.2f} GB/s",
    ),
    Counter(
        "waiting",
        "tasks that wait",
        heading="waiting",
        cell=lambda x: str(x.waiting),
        live=lambda x: f"{x.waiting} waiting",
    ),
    Counter(
        "refused",
        "requests refused, malformed or met by a full server",
        grows=True,
        heading="refused",
        cell=lambda x: str(x.refused),
        live=lambda x: f"{x.refused / max(1, x.tasks + x.refused):.0%} refused",
    ),
    Counter(
        "busy_seconds",
        "seconds of computing",
        grows=True,
        heading="busy",
        cell=lambda x: f"{_per_second(x.busy_seconds, x):.0%}",
        live=lambda x: f"{_per_second(x.busy_seconds, x):.0%} busy",
    ),
    Counter("batches", "fused calls", grows=True),
    Counter(
        "caches",
        "caches of keys and values",
        heading="caches",
        cell=lambda x: str(x.caches),
    ),
    Counter(
        "cache_bytes",
        "bytes that these take",
        heading="GB of caches",
        cell=lambda x: f"{x.cache_bytes / GIGABYTE:.2f}",
    ),
    Counter("draining", "whether the server is about to leave"),
    Counter("seconds", "seconds since the server's start"),
)
COLUMNS = tuple((counter.heading, counter.cell) for counter in COUNTERS if counter.cell is not None)


def over_interval(now: Status, before: Status) -> Status:
    """Return `now` with the growth since `before` in place of its totals."""
    names = [counter.name for counter in COUNTERS if counter.grows] + ["seconds"]
    growth = {name: getattr(now, name) - getattr(before, name) for name in names}
    return msgspec.structs.replace(now, **growth)


def live_line(now: Status, before: Status) -> str:
    """Return one line with a server's work between two statuses."""
    interval = over_interval(now, before)
    return "  ".join(counter.live(interval) for counter in COUNTERS if counter.live is not None)
