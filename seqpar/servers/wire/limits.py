"""What a server takes at most, and how long anything may last: said here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise

from seqpar.core.arguments import as_float, as_int

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_SLICES = 2**20
MAX_CONTROL_BYTES = 2**16  # of a message without its payload
MAX_ANSWER_BYTES = 2**26  # of a frame that a client takes: results of 128 GiB come in such pieces
MAX_FRAMES = 2**12  # of a message
PIECE_BYTES = 2**20  # of a frame of a large payload
LEAST_RATE = 2**20  # bytes per second; deadlines do not wait for a slower link


@dataclass(frozen=True)
class Limits:
    """The caps of a server: what is above one is refused before anything is allocated for it.

    Attributes:
        tokens: query rows, and key rows, of a request.
        bytes: of a request's payload, and of its result's.
        queued_bytes: of all requests that a server holds.
        requests: that one client may have in flight: its credits.
        clients: with a lease at once.
        cache_bytes: of all keys and values that a server holds for clients.
    """

    tokens: int = 2**20
    bytes: int = 2**31
    queued_bytes: int = 2**33
    requests: int = 32
    clients: int = 256
    cache_bytes: int = 2**33

    def __post_init__(self) -> None:
        for field in fields(self):
            as_int(field.name, getattr(self, field.name), 1, 2**40)


@dataclass(frozen=True)
class Deadlines:
    """How long a client waits for what, in seconds: connect < request < hedge < give_up < group.

    `request`, `hedge` and `give_up` are longer while payloads pass: by twice the seconds that the
    payloads and results of all tasks at the server need at the rate measured on its link, which
    counts as at least 1 MiB per second.

    Attributes:
        connect: for a handshake, and, but for 1 s at least, for a sign of life from a server: a
            pong, or a piece of a result; then it counts as lost.
        request: for an answer to one attempt at a task, since its server was asked, or answered
            another task; then another server is asked.
        hedge: for an answer from any server, since the pool was asked, or had another task's
            result; then the task is computed at home.
        give_up: for a task altogether, likewise; then its future raises.
        group: the timeout of the trainers' process group, which must not end first; inf: there is
            none.
    """

    connect: float = 5.0
    request: float = 30.0
    hedge: float = 60.0
    give_up: float = 120.0
    group: float = math.inf

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
    """The checked options of `ServerPool.connect`.

    Attributes:
        has_home: the option `home`; if it is False, `home_depth` is 0.
    """

    deadlines: Deadlines
    hedge_quantile: float
    depth: int
    has_home: bool
    home_depth: int
    sample: int


@dataclass(frozen=True)
class ServerDeadlines:
    """How long a server waits for a client, in seconds.

    Attributes:
        idle: for any message; then the client's lease ends, and all that it holds is freed. A
            client that lives says so three times as often. A connection on which no message
            ends, and less than 1 MiB of one arrives, is ended too.
        request: for a request to be begun; then it is refused, as nobody waits for it any more.
        handshake: for a connection to authenticate.
        transfer: for a one-sided write, in addition to a second per MiB.
        drain: for what is in flight when the server is told to end.
    """

    idle: float = 10.0
    request: float = 120.0
    handshake: float = 5.0
    transfer: float = 10.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < as_float(field.name, getattr(self, field.name)) < math.inf:
                found = getattr(self, field.name)
                raise ValueError(f"{field.name} must be finite and above 0 seconds, got {found}")
