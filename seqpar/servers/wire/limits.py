"""All limits and deadlines of servers and pools.

A *payload* is the bytes of a request's tensors, without the request's header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import pairwise

from seqpar.core.arguments import as_float, as_int
from seqpar.core.memory import usable_memory

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_SLICES = 2**20
MAX_MESSAGE_BYTES = 2**22  # the largest gRPC message; payloads are sent in smaller messages
# The longest deadline that a call can have; every call must have a deadline.
MAX_CALL_SECONDS = 3600.0
# The text with which such a server sends the status UNAVAILABLE.
LEAVING = "the server is about to leave"
LEAST_RATE = 2**20  # bytes per second; deadlines assume that the network is at least as fast


def _of_memory(parts: int, most: int) -> int:
    """Return 1/`parts` of the memory that this process may use, but at most `most` bytes."""
    return min(usable_memory() // parts, most)


@dataclass(frozen=True)
class Limits:
    """The limits of a server, which are checked before the server allocates memory for a request.

    With the defaults, all requests, results and caches together take at most half of the memory
    that the process may use (`usable_memory`).
    """

    tokens: int = 2**20  # the most query rows of a request, and the most key rows
    # The most bytes of a request's payload, and the most bytes of its result.
    bytes: int = field(default_factory=lambda: _of_memory(8, 2**31))
    # The most bytes of all requests and results that a server has at a time.
    queued_bytes: int = field(default_factory=lambda: _of_memory(4, 2**33))
    # The most requests without a result that a session can have. If several sessions have the same
    # name in their certificates, the n-th of them gets this number divided by n, but at least one.
    requests: int = 32
    clients: int = 256  # the most sessions at a time
    # The most bytes of all keys and values that a server stores for clients.
    cache_bytes: int = field(default_factory=lambda: _of_memory(4, 2**33))

    def __post_init__(self) -> None:
        for each in fields(self):
            as_int(each.name, getattr(self, each.name), 1, 2**40)


@dataclass(frozen=True)
class Deadlines:
    """A client's deadlines in seconds: connect < request < hedge < give_up < group.

    The deadlines `request`, `hedge` and `give_up` are extended by twice the time for sending the
    payloads and results of all tasks that the server has not answered. The time is computed from
    the measured bandwidth of the server, but from at least 1 MiB per second.
    """

    # The deadline for a handshake. It is also the longest time without an event of a session, but
    # this time is at least 1 s; afterwards the server counts as lost.
    connect: float = 5.0
    # The deadline for a server's answer to a task. The time starts when the task is sent, and again
    # whenever the server answers another task. After the deadline, another server gets the task.
    request: float = 30.0
    # The deadline for an answer of any server. The time starts when the task is submitted, and
    # again whenever the pool gets the result of another task. Afterwards, this process computes the
    # task.
    hedge: float = 60.0
    # The deadline for a result. The time starts as for `hedge`. Afterwards, the task's future
    # raises.
    give_up: float = 120.0
    # The timeout of the trainers' process group, which should be longer than all deadlines.
    group: float = math.inf

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        values = [as_float(name, getattr(self, name)) for name in names]
        if not values[0] > 0:
            raise ValueError(f"connect must be above 0 seconds, got {values[0]}")
        for i, (before, after) in enumerate(pairwise(values)):
            if not before < after:
                order = f"{names[i + 1]} must be longer than {names[i]}"
                raise ValueError(f"{order}, got {after:g} and {before:g} seconds: change one")


@dataclass(frozen=True)
class PoolOptions:
    """The checked options of `ServerPool.connect`."""

    deadlines: Deadlines
    hedge_quantile: float
    depth: int
    has_home: bool  # the option `home`: whether this process computes what no server computes
    home_depth: int  # the option `home_depth`, or 0 if `has_home` is False
    sample: int


@dataclass(frozen=True)
class ServerDeadlines:
    """A server's deadlines in seconds."""

    # The deadline for a client to answer gRPC's keepalive, and to read an event of its session.
    # Afterwards, the session ends, and the server frees everything that it stores for the session.
    idle: float = 10.0
    # The deadline for a request to get memory, and again to be computed. Afterwards, the call ends
    # with RESOURCE_EXHAUSTED, and the pool sends the request again.
    request: float = 120.0
    # The deadline for a connection to authenticate, and for a call to send its first message.
    handshake: float = 5.0
    transfer: float = 10.0  # the deadline for a payload or a result, plus one second per MiB
    drain: float = 30.0  # how long a server that was told to stop waits for its last requests

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 < as_float(each.name, getattr(self, each.name)) < math.inf:
                value = getattr(self, each.name)
                raise ValueError(f"{each.name} must be finite and above 0 seconds, got {value}")
