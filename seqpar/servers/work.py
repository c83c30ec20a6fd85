"""What a pool knows of a task: where it has been tried, and its one result."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from seqpar.servers.codec import Packed
from seqpar.servers.request import Request

Answer = Future[tuple[Tensor, ...]]


@dataclass(eq=False)
class Work:
    """A task that was submitted.

    Attributes:
        request: the task.
        packed: what is sent.
        future: the caller's; it is resolved once, by whichever answer comes first.
        submitted: when, by the monotonic clock.
        attempts: those that may still be answered.
        avoid: the addresses of servers that have failed it.
        failures: how many attempts servers have failed.
        reason: why the last attempt failed.
        hedged: whether a second server was asked while the first had not answered.
        at_home: whether it is computed, or was, in this process.
        cost: the task's work.
    """

    request: Request
    packed: Packed
    future: Answer = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    attempts: list[Attempt] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    failures: int = 0
    reason: str = "no server was ready"
    hedged: bool = False
    at_home: bool = False
    cost: int = field(init=False)

    def __post_init__(self) -> None:
        self.cost = self.request.work  # by the thread that submits, since it takes a while

    @property
    def settled(self) -> bool:
        """Whether it has its result, or nobody waits for it."""
        return self.future.done()


@dataclass(eq=False)
class Attempt:
    """A task at a server.

    Attributes:
        work: the task.
        address: the server's.
        number: under which the server knows it.
        place, result_place: in the server's arena and in ours, or None.
        started: when, by the monotonic clock.
        late: whether its deadline is over; the server still owes an answer, and has its places.
    """

    work: Work
    address: str
    number: int
    place: int | None = None
    result_place: int | None = None
    started: float = field(default_factory=time.monotonic)
    late: bool = False
