"""All limits and deadlines of servers and pools."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import pairwise

from seqpar.core.arguments import as_float, as_int
from seqpar.core.memory import usable_memory

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_SLICES = 2**20
MAX_MESSAGE_BYTES = 2**22  # that gRPC accepts; a payload travels in smaller messages
MAX_CALL_SECONDS = 3600.0  # of one request; a call without such a deadline is refused
LEAST_RATE = 2**20  # bytes per second; deadlines do not allow for a slower network


def _of_memory(parts: int, most: int) -> int:
    """Return a default limit: one of `parts` of the memory that this process may use, or `most`."""
    return min(usable_memory() // parts, most)


@dataclass(frozen=True)
class Limits:
    """The caps of a server. A request above a cap is refused before memory is allocated for it.

    By default, all requests and results and all caches together take at most half of the memory
    that the process may use (`usable_memory`).
    """

    tokens: int = 2**20  # query rows, and key rows, of one request
    # Of one request's payload, and of its result
    bytes: int = field(default_factory=lambda: _of_memory(8, 2**31))
    # Of all requests and results that a server holds
    queued_bytes: int = field(default_factory=lambda: _of_memory(4, 2**33))
    # Requests that one client may have without a result. The n-th session of a certificate gets the
    # n-th part of them, at least one.
    requests: int = 32
    clients: int = 256  # that have a session
    # Of all keys and values that a server holds for clients
    cache_bytes: int = field(default_factory=lambda: _of_memory(4, 2**33))

    def __post_init__(self) -> None:
        for each in fields(self):
            as_int(each.name, getattr(self, each.name), 1, 2**40)


@dataclass(frozen=True)
class Deadlines:
    """A client's deadlines in seconds: connect < request < hedge < give_up < group.

    Payloads on the network extend `request`, `hedge` and `give_up`: by twice the seconds that the
    payloads and results of all tasks at the server need at the measured rate of its connection. The
    rate counts as at least 1 MiB per second.
    """

    # For a handshake. A server is lost after this time, and at least 1 s, without an event of its
    # session.
    connect: float = 5.0
    # For the answer to one attempt, since it was sent or its server last answered another task.
    # Then another server is asked.
    request: float = 30.0
    # For the answer of any server, since the task was submitted or the pool last had another task's
    # result. Then this process computes the task.
    hedge: float = 60.0
    give_up: float = 120.0  # for a result, counted in the same way; then the task's future raises
    group: float = math.inf  # the timeout of the trainers' process group, which must not end first

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        values = [as_float(name, getattr(self, name)) for name in names]
        if not values[0] > 0:
            raise ValueError(f"connect must be above 0 seconds, got {values[0]}")
        for i, (before, after) in enumerate(pairwise(values)):
            if not before < after:
                order = f"{names[i]} < {names[i + 1]}"
                raise ValueError(f"{names[i + 1]}: deadlines are ordered, {order}, got {values}")


@dataclass(frozen=True)
class PoolOptions:
    """The checked options of `ServerPool.connect`."""

    deadlines: Deadlines
    hedge_quantile: float
    depth: int
    has_home: bool  # the option `home`
    home_depth: int  # 0 without `home`
    sample: int


@dataclass(frozen=True)
class ServerDeadlines:
    """A server's deadlines in seconds."""

    # For a client's connection to answer gRPC's keepalive, and for a client to take a session's
    # event. Then the session ends, and all that the server holds for it is freed.
    idle: float = 10.0
    # For a request to get memory, and then for its turn to be computed. When the time is over, the
    # call ends with RESOURCE_EXHAUSTED, and the pool sends the request again.
    request: float = 120.0
    handshake: float = 5.0  # for a connection to authenticate, and for the first message of a call
    transfer: float = 10.0  # for a payload or a result, plus one second per MiB
    drain: float = 30.0  # for requests in flight when the server is told to end

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 < as_float(each.name, getattr(self, each.name)) < math.inf:
                value = getattr(self, each.name)
                raise ValueError(f"{each.name} must be finite and above 0 seconds, got {value}")
