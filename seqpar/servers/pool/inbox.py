"""What other threads hand to the thread of a pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from seqpar.servers.pool.work import PendingWork
from seqpar.servers.transport.wakeup import Wakeup
from seqpar.servers.wire.errors import ServersError


class Inbox:
    """Works to be computed, and calls to be made; any thread may hand them over.

    Attributes:
        works, calls: what was handed over, for the pool's thread to take.
        wakeup: what wakes it.
        ended: why nothing more is taken, or None.
    """

    def __init__(self) -> None:
        self.works: deque[PendingWork] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        self.wakeup, self.ended = Wakeup(), None
        self._lock = threading.Lock()

    ended: str | None

    def put(self, work: PendingWork) -> None:
        """Have a task or a step computed."""
        with self._lock:
            if self.ended is not None:
                raise ServersError(self.ended)
            self.works.append(work)
        self.wakeup.set()

    def call(self, call: Callable[[], None]) -> None:
        """Have a call made, soon: the thread is not woken.

        This takes no lock, since the garbage collector calls it too, at any moment.
        """
        self.calls.append(call)

    def end(self, reason: str) -> None:
        """Take nothing more, for this reason unless there was one before."""
        with self._lock:
            self.ended = self.ended or reason
        self.wakeup.set()
