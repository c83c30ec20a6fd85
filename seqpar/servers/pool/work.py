"""What a pool knows of a task: where it has been tried, and its one result."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.servers.wire.codec import Packed, pack
from seqpar.servers.wire.request import Request

Answer = Future[tuple[Tensor, ...]]


class CachePlace(NamedTuple):
    """Where a cache is: at this server, under this lease.

    Attributes:
        address: the server's.
        generation: of the lease.
        tokens, bytes: that a request may have there.
    """

    address: str
    generation: int
    tokens: int
    bytes: int


@dataclass(eq=False)
class PendingWork:
    """A task that was submitted, or a step of a cache.

    Attributes:
        request: the task; None of a step.
        packed: what is sent.
        device: where its result belongs.
        cost: its work.
        place: the only one where it may be computed, that of its cache; None of a task.
        future: the caller's; it is resolved once, by whichever answer comes first.
        submitted: when, by the monotonic clock.
        attempts: those that may still be answered.
        avoid: the addresses of servers that have failed it.
        failures: how many attempts servers have failed.
        reason: why the last attempt failed.
        hedged: whether a second server was asked while the first had not answered.
        at_home: whether it is computed, or was, in this process.
        passing: seconds for which payloads of an attempt that has ended may have been passing.
    """

    request: Request | None
    packed: Packed
    device: torch.device
    cost: int
    place: CachePlace | None = None
    future: Answer = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    attempts: list[Attempt] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    failures: int = 0
    reason: str = "no server was ready"
    hedged: bool = False
    at_home: bool = False
    passing: float = 0.0

    @classmethod
    def of(cls, request: Request) -> PendingWork:
        """Return a task to be submitted, by the thread that does so, since this takes a while."""
        return cls(request, pack(request), request.q.device, request.work)

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

    work: PendingWork
    address: str
    number: int
    place: int | None = None
    result_place: int | None = None
    started: float = field(default_factory=time.monotonic)
    late: bool = False
