"""All limits and deadlines of servers and pools."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise

from seqpar.core.arguments import as_float, as_int

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_SLICES = 2**20
MAX_CONTROL_BYTES = 2**16  # per message, without its payload
MAX_ANSWER_BYTES = 2**26  # per frame that a client accepts; enough for a result of 128 GiB
MAX_FRAMES = 2**12  # per message
PIECE_BYTES = 2**20  # per frame of a large payload
LEAST_RATE = 2**20  # bytes per second; deadlines do not allow for a slower network


@dataclass(frozen=True)
class Limits:
    """The caps of a server. A request above a cap is refused before memory is allocated for it."""

    tokens: int = 2**20  # query rows, and key rows, of one request
    bytes: int = 2**31  # of one request's payload, and of its result
    queued_bytes: int = 2**33  # of all requests and results that a server holds
    # Requests that one client may have in flight (its credits). If several keys are trusted, the
    # n-th client of a key gets the n-th part of them, at least one.
    requests: int = 32
    clients: int = 256  # with a lease
    cache_bytes: int = 2**33  # of all keys and values that a server holds for clients

    def __post_init__(self) -> None:
        for field in fields(self):
            as_int(field.name, getattr(self, field.name), 1, 2**40)


@dataclass(frozen=True)
class Deadlines:
    """A client's deadlines in seconds: connect < request < hedge < give_up < group.

    Payloads on the network extend `request`, `hedge` and `give_up`: by twice the seconds that the
    payloads and results of all tasks at the server need at the measured rate of its connection. The
    rate counts as at least 1 MiB per second.
    """

    # For a handshake. A server is lost after this time, and at least 1 s, without a sign of life (a
    # pong, or a piece of a result).
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
        names = [field.name for field in fields(self)]
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

    # For a client's next message. Then its lease ends, and all that the server holds for it is
    # freed. A live client gives a sign of life at least three times as often. A connection also
    # ends if neither a whole message nor 1 MiB of one arrives in this time.
    idle: float = 10.0
    # For a request's turn to be computed. Then a task gets the answer of a full server, since its
    # client may have given it up, and a step of a cache is refused.
    request: float = 120.0
    handshake: float = 5.0  # for a connection to authenticate
    transfer: float = 10.0  # for a one-sided write, plus one second per MiB
    drain: float = 30.0  # for requests in flight when the server is told to end

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < as_float(field.name, getattr(self, field.name)) < math.inf:
                value = getattr(self, field.name)
                raise ValueError(f"{field.name} must be finite and above 0 seconds, got {value}")
