"""The queue through which other threads hand work to a pool's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from seqpar.servers.pool.connection import Answer, PendingWork
from seqpar.servers.transport.sockets import Wakeup
from seqpar.servers.wire.request import ServersError


class Inbox:
    """Work and calls that any thread hands to the pool's thread."""

    def __init__(self) -> None:
        self.works: deque[PendingWork] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        self.wakeup = Wakeup()
        self.ended: str | None = None  # why the inbox accepts nothing more
        self._lock = threading.Lock()

    def put(self, work: PendingWork) -> Answer:
        """Hand over work; return the future of its result."""
        with self._lock:
            if self.ended is not None:
                raise ServersError(self.ended)
            self.works.append(work)
        self.wakeup.set()
        return work.future

    def call(self, call: Callable[[], None]) -> None:
        """Queue a call, which the pool's thread makes the next time that it wakes up."""
        # No lock: the garbage collector may call this at any moment, even while it is held.
        self.calls.append(call)

    def end(self, reason: str) -> None:
        """Accept nothing more. The first reason is kept."""
        with self._lock:
            self.ended = self.ended or reason
        self.wakeup.set()
