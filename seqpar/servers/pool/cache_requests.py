"""The steps of caches in a pool: each is for one server, and is lost with what that holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

import torch

from seqpar.servers.pool.inbox import Inbox
from seqpar.servers.pool.link import ServerLink
from seqpar.servers.pool.links import Links
from seqpar.servers.pool.local_worker import Home
from seqpar.servers.pool.work import Answer, CachePlace, PendingWork
from seqpar.servers.wire.codec import Packed
from seqpar.servers.wire.errors import ServersError, StepLostError
from seqpar.servers.wire.limits import Deadlines

_AT_ONCE = 2**20  # at a server, if it gives so many credits


class Steps:
    """Steps that wait to be sent, and what is built on them needs to know of servers.

    Any thread may call `place`, `submit`, `forget` and `count_at_home`, the dispatcher's the rest.
    A step that is lost raises a StepLostError in its caller's thread, which has what it takes to
    build the cache again.

    Attributes:
        deadlines: after `request` seconds a step without a result is lost.
        has_home: whether what no server computes is computed in this process.
        sample: how many rows of each task's result are computed again.
    """

    def __init__(
        self,
        links: Links,
        inbox: Inbox,
        home: Home,
        deadlines: Deadlines,
        has_home: bool,
        sample: int,
        send: Callable[[PendingWork, ServerLink], None],
        give_up: Callable[[PendingWork, BaseException], None],
    ) -> None:
        """`send` and `give_up` are the dispatcher's."""
        self.deadlines, self.has_home, self.sample = deadlines, has_home, sample
        self._links, self._inbox, self._home = links, inbox, home
        self._send, self._give_up = send, give_up
        self._waiting: deque[PendingWork] = deque()

    def place(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Return where a cache of so many bytes goes, if a server has room for it."""
        if self._inbox.ended is not None:
            raise ServersError(self._inbox.ended)
        return self._links.place(nbytes, avoid)

    def submit(self, place: CachePlace, packed: Packed, device: torch.device, cost: int) -> Answer:
        """Let a step be computed where its cache is, and return the future of (out, lse)."""
        work = PendingWork(None, packed, device, cost, place)
        self._inbox.put(work)
        return work.future

    def forget(self, place: CachePlace, cache: int) -> None:
        """Let a server free a cache, if that is still there."""

        def call() -> None:
            if (link := self._links.at(place)) is not None:
                link.forget(cache)

        self._inbox.call(call)

    def count_at_home(self, cost: int) -> None:
        """Count a step that was computed in this process."""
        self._inbox.call(lambda: self._home.count(cost))

    def wait(self, work: PendingWork) -> None:
        """Let a step be sent: again, if its server was busy, or is lost."""
        self._waiting.append(work)

    def lose(self, work: PendingWork, blame: bool = True) -> None:
        """Tell a step's caller that the cache is lost, and whether its server is to blame."""
        self._links.cancel_all(work)
        self._give_up(work, StepLostError(work.reason, blame))

    def assign(self, now: float) -> None:
        """Send what waits, each to where its cache is."""
        waiting: deque[PendingWork] = deque()
        while self._waiting:
            work = self._waiting.popleft()
            if work.settled:
                continue
            assert work.place is not None
            link = self._links.at(work.place)
            if link is None:
                self.lose(work, blame=False)
            elif not link.takes(work):
                work.reason = "it is above the caps of its server (--max-tokens, --max-bytes)"
                self.lose(work)
            elif link.free(_AT_ONCE, now):
                self._send(work, link)
            else:
                waiting.append(work)
        self._waiting = waiting

    def look_at(self, work: PendingWork, now: float) -> None:
        """Lose a step that has waited for too long."""
        waited, limit = now - work.submitted, self.deadlines.request
        if waited > limit and waited > (limit := limit + self._links.allowance(work)):
            work.reason = f"no answer within {limit:.3g} s"
            self.lose(work)
