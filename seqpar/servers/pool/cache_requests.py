"""The steps of caches in a pool. A step has one possible server, and is lost with its cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

import torch

from seqpar.servers.pool.connection import Answer, CachePlace, PendingWork, ServerConnection
from seqpar.servers.pool.inbox import Inbox
from seqpar.servers.pool.known_servers import KnownServers
from seqpar.servers.pool.local_worker import LocalWorker
from seqpar.servers.wire.codec import Packed
from seqpar.servers.wire.limits import PoolOptions
from seqpar.servers.wire.request import ServersError

_MAX_STEPS_AT_ONCE = 2**20  # per server, unless it gives fewer credits


class StepLostError(Exception):
    """A cache was lost, or its server did not answer. The cache's code catches this error.

    `blame` is whether a server that is still connected is at fault.
    """

    def __init__(self, reason: str, blame: bool) -> None:
        super().__init__(reason)
        self.blame = blame


class CacheRequests:
    """Places caches and sends their steps.

    A lost step raises a StepLostError in its caller's thread, which can build the cache again. Any
    thread may call `place`, `submit`, `forget` and `count_at_home`; the pool's thread makes all
    other calls.
    """

    def __init__(
        self,
        options: PoolOptions,
        servers: KnownServers,
        inbox: Inbox,
        local_worker: LocalWorker,
        send: Callable[[PendingWork, ServerConnection], None],
        give_up: Callable[[PendingWork, BaseException], None],
    ) -> None:
        """`send` and `give_up` are the dispatcher's."""
        self.options = options
        self._servers, self._inbox, self._local_worker = servers, inbox, local_worker
        self._send, self._give_up = send, give_up
        self._waiting: deque[PendingWork] = deque()

    def place(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Reserve `nbytes` for a cache at a server that is not in `avoid`, or return None."""
        if self._inbox.ended is not None:
            raise ServersError(self._inbox.ended)
        return self._servers.place(nbytes, avoid)

    def submit(self, place: CachePlace, packed: Packed, device: torch.device, cost: int) -> Answer:
        """Send a step to its cache; return the future of (out, lse)."""
        return self._inbox.put(PendingWork(None, packed, device, cost, place))

    def forget(self, place: CachePlace, cache: int) -> None:
        """Free a cache on its server, if the pool still has a connection to it."""

        def call() -> None:
            if (connection := self._servers.at(place)) is not None:
                connection.forget(cache)

        self._inbox.call(call)

    def count_at_home(self, cost: int) -> None:
        """Count a step that this process computed."""
        self._inbox.call(lambda: self._local_worker.count(cost))

    def wait(self, work: PendingWork) -> None:
        """Send a step as soon as its server is free."""
        self._waiting.append(work)

    def lose(self, work: PendingWork, blame: bool = True) -> None:
        """Raise a StepLostError for a step; `blame` says whether its server is at fault."""
        work.cancel_attempts()
        self._give_up(work, StepLostError(work.reason, blame))

    def assign(self, now: float) -> None:
        """Send the waiting steps whose servers are free."""
        waiting: deque[PendingWork] = deque()
        while self._waiting:
            work = self._waiting.popleft()
            if work.settled:
                continue
            assert work.place is not None
            connection = self._servers.at(work.place)
            if connection is None:
                self.lose(work, blame=False)
            elif not connection.accepts(work):
                work.reason = "it is above the caps of its server (--max-tokens, --max-bytes)"
                self.lose(work)
            elif connection.is_free(_MAX_STEPS_AT_ONCE, now):
                self._send(work, connection)
            else:
                waiting.append(work)
        self._waiting = waiting

    def check_deadline(self, work: PendingWork, now: float) -> None:
        """Lose a step that has waited for too long."""
        waited, limit = now - work.submitted, self.options.deadlines.request
        if waited > limit and waited > (limit := limit + self._servers.allowance(work)):
            work.reason = f"no answer within {limit:.3g} s"
            self.lose(work)
