"""The list of all numbers that a server reports, and how they are shown.

The numbers are shown on the metrics page, in the table of `python -m seqpar status`, and in a line
that `python -m seqpar serve` updates in a terminal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

GIGABYTE = 1e9


@dataclass
class Totals:
    """Totals since the server's start, which are also fields of `Status`."""

    tasks: int = 0  # the number of tasks and steps that were computed
    tokens: int = 0  # the query rows of these tasks and steps
    bytes: int = 0  # the bytes of their payloads and results
    # The number of calls that ended with an error, except calls whose session had ended.
    refused: int = 0


@dataclass(frozen=True)
class Status:
    """A server's numbers, as in the message `StatusReply`. Totals are since the server's start."""

    library: str
    device: str
    transports: list[str]
    seconds: float
    clients: int
    waiting: int
    tasks: int
    tokens: int
    bytes: int
    refused: int
    busy_seconds: float
    batches: int
    caches: int
    cache_bytes: int
    draining: bool


@dataclass(frozen=True)
class Counter:
    """One number that a server reports."""

    name: str  # the field of `Status`; `seqpar_` + name is the name on the metrics page
    help: str  # the explanation of the number on the metrics page
    grows: bool = False  # whether the number never decreases
    heading: str = ""  # the heading of its column in the table of `status`; "" for no column
    cell: str = ""  # the format of a cell in this column, with the names of `_numbers`
    live: str = ""  # the format of the number in the live line, for the time since the last line


COUNTERS = (
    Counter(
        "clients", "clients with a session", False, "clients", "{clients}", "{clients} clients"
    ),
    Counter("tasks", "tasks computed", True, "tasks", "{tasks}", "{tasks_rate:,.0f} tasks/s"),
    Counter(
        "tokens", "query rows of these tasks", True,
        "tokens", "{tokens}", "{tokens_rate:,.0f} tokens/s",
    ),
    Counter(
        "bytes", "bytes of their payloads and results", True,
        "GB", "{gigabytes:.2f}", "{gigabytes_rate:.2f} GB/s",
    ),
    Counter("waiting", "tasks that wait", False, "waiting", "{waiting}", "{waiting} waiting"),
    Counter(
        "refused", "requests refused, malformed or met by a full server", True,
        "refused", "{refused}", "{refused_share:.0%} refused",
    ),
    Counter(
        "busy_seconds", "seconds of computing", True,
        "busy", "{busy_share:.0%}", "{busy_share:.0%} busy",
    ),
    Counter("batches", "computing calls, each of one task or of several", True),
    Counter("caches", "caches of keys and values", False, "caches", "{caches}"),
    Counter("cache_bytes", "bytes that these take", False, "GB of caches", "{cache_gigabytes:.2f}"),
    Counter("draining", "whether the server is about to leave"),
    Counter("seconds", "seconds since the server's start"),
)  # fmt: skip
HEADINGS = [counter.heading for counter in COUNTERS if counter.heading]


def cells(status: Status) -> list[str]:
    numbers = _numbers(status)
    return [counter.cell.format(**numbers) for counter in COUNTERS if counter.cell]


def live_line(now: Status, before: Status) -> str:
    """Return a line that describes a server's work between two statuses."""
    names = [counter.name for counter in COUNTERS if counter.grows] + ["seconds"]
    growth = {name: getattr(now, name) - getattr(before, name) for name in names}
    numbers = _numbers(replace(now, **growth))
    return "  ".join(counter.live.format(**numbers) for counter in COUNTERS if counter.live)


def _numbers(status: Status) -> dict[str, object]:
    seconds, gigabytes = max(status.seconds, 1e-9), status.bytes / GIGABYTE
    return asdict(status) | {
        "tasks_rate": status.tasks / seconds,
        "tokens_rate": status.tokens / seconds,
        "gigabytes": gigabytes,
        "gigabytes_rate": gigabytes / seconds,
        "cache_gigabytes": status.cache_bytes / GIGABYTE,
        "refused_share": status.refused / max(1, status.tasks + status.refused),
        "busy_share": status.busy_seconds / seconds,
    }
