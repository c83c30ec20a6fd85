"""The thread of a pool: it sends tasks to servers, and sees that each gets one result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq
from torch import Tensor

from seqpar.servers.pool.cache_requests import Steps
from seqpar.servers.pool.hedging import Hedging
from seqpar.servers.pool.inbox import Inbox
from seqpar.servers.pool.link import ServerLink
from seqpar.servers.pool.links import Links
from seqpar.servers.pool.local_worker import Home
from seqpar.servers.pool.report import PoolReport
from seqpar.servers.pool.work import Answer, Attempt, PendingWork
from seqpar.servers.transport.zeromq import TransportError
from seqpar.servers.wire import protocol
from seqpar.servers.wire.errors import ServersError
from seqpar.servers.wire.limits import Deadlines
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.protocol import ProtocolError
from seqpar.servers.wire.request import Request

_BEAT, _IDLE_BEAT = 0.02, 0.1  # seconds between two looks at deadlines
_WRONG = "its answer was wrong"
_MOST_FAILURES = 3  # of a task; then it is computed at home


class Dispatcher(threading.Thread):
    """Owns the links to servers; other threads hand it work by `submit`.

    Attributes:
        steps: those of caches.
    """

    def __init__(
        self, links: Links, deadlines: Deadlines, hedging: Hedging, home_depth: int, sample: int
    ) -> None:
        """`home_depth` and `sample` are as in `ServerPool.connect`; −1: there is no home."""
        super().__init__(name="seqpar-pool", daemon=True)
        self._links, self._deadlines, self._hedging = links, deadlines, hedging
        self._has_home, self._sample = home_depth >= 0, sample
        self._inbox = Inbox()
        links.poller.register(self._inbox.wakeup.fd, zmq.POLLIN)
        self._home = Home(self._inbox.wakeup.set, home_depth)
        given = deadlines, self._has_home, sample
        self.steps = Steps(links, self._inbox, self._home, *given, self._send, self._give_up)
        self._works: list[PendingWork] = []  # without a result
        self._pending: deque[PendingWork] = deque()  # of these, tasks that wait for a server
        self._retried = self._hedged = self._wasted = 0
        self._progress = 0.0  # when the last result came

    def submit(self, request: Request) -> Answer:
        """Let a task be computed, and return its future."""
        work = PendingWork.of(request)
        self._inbox.put(work)
        return work.future

    def serve_at(self, addresses: Sequence[str]) -> None:
        """Use the servers at these addresses from now on, and no others."""
        self._inbox.call(partial(self._use, tuple(addresses)))
        self._inbox.wakeup.set()

    def close(self) -> None:
        """Leave all servers, and end; tasks without a result raise.

        A callback of a future runs in this thread, so there it only tells the thread to end.
        """
        self._inbox.end("the pool was closed")
        if threading.current_thread() is not self:
            self.join()

    def report(self) -> PoolReport:
        """Return where tasks were computed; any thread may ask."""
        counts = self._retried, self._hedged, self._wasted
        waiting = len(self._works) + len(self._inbox.works)
        return PoolReport.of(list(self._links), self._home, *counts, waiting)

    def run(self) -> None:
        beat = 0.0
        try:
            while self._inbox.ended is None:
                patience = self._links.patience(_BEAT if self._works else _IDLE_BEAT)
                ready = {key for key, _ in self._links.poller.poll(patience)}
                if self._inbox.wakeup.fd in ready:
                    self._inbox.wakeup.clear()
                self._take_in()
                for transport in self._links.transports.values():
                    for lane, written in transport.poll():
                        lane.arrived.append(written)
                for link in self._links:
                    self._attend_to(link, ready)
                now = time.monotonic()
                if now >= beat:
                    beat = now + _BEAT
                    self._beat(now)
                self._assign(now)
        except Exception as error:  # nobody shall wait for ever
            self._inbox.end(f"the pool has failed: {type(error).__name__}: {error}")
            raise
        finally:
            for work in [*self._works, *self._inbox.works]:
                self._give_up(work, ServersError(str(self._inbox.ended)))
            self._links.close()
            self._home.close()
            self._inbox.wakeup.close()

    def _take_in(self) -> None:
        while self._inbox.works:
            work = self._inbox.works.popleft()
            self._works.append(work)
            if work.place is None:
                self._pending.append(work)
            else:
                self.steps.wait(work)
        while self._inbox.calls:
            self._inbox.calls.popleft()()
        while self._home.examined:
            attempt, tensors, right = self._home.examined.popleft()
            if right:
                self._accept(attempt, tensors)
            else:
                for owed in self._links.distrust(attempt.address, _WRONG):
                    self._failed(owed, _WRONG, blame=False)
                self._failed(attempt, _WRONG)
        while (done := self._home.finished()) is not None:
            work, outcome = done
            if isinstance(outcome, Exception):
                self._give_up(work, outcome)
            elif outcome is not None:
                self._commit(work, outcome, partial(self._home.count, work.cost))

    def _use(self, addresses: Sequence[str]) -> None:
        for link in self._links.use(addresses):
            self._lose(link, "it is no longer listed")
            link.close()

    def _attend_to(self, link: ServerLink, ready: set[Any]) -> None:
        """Deal with all that has arrived from a server, and with what is on its way to it."""
        reason = None
        ended = any(monitor in ready for _, monitor in link.sockets)
        readable = ended or any(socket in ready for socket, _ in link.sockets)  # what came before
        try:
            while (found := link.receive(readable)) is not None:
                self._answered(link, *found)
        except ProtocolError as error:
            reason = str(error)
        if reason is None and ended:
            reason = link.broken()
        if reason is None:
            reason = link.progress()
        if reason is not None:
            self._lose(link, reason)
        if readable or reason is not None:
            self._links.say_changed()

    def _lose(self, link: ServerLink, reason: str) -> None:
        for attempt in link.lose(reason):
            self._failed(attempt, reason, blame=False)

    def _answered(self, link: ServerLink, message: protocol.Message, frames: list[Any]) -> None:
        attempt = link.attempts.get(getattr(message, "request", -1))
        if attempt is None:
            return  # of an attempt that was answered before
        now = time.monotonic()
        if isinstance(message, protocol.Result):
            try:
                tensors = link.finish_with(attempt, message, frames)
            except (RequestError, TransportError) as error:
                self._failed(attempt, str(error))
                return
            if attempt.work.place is None:  # of tasks alone it is known what they cost
                link.count(attempt, now)
                self._hedging.count(attempt.work.cost, now - attempt.started)
            if self._sample and not attempt.work.settled:
                self._home.examine(attempt, tensors, self._sample)
            else:
                self._accept(attempt, tensors)
            return
        link.finish(attempt)
        if isinstance(message, protocol.Busy):
            link.block(message.after, now)
            self._failed(attempt, "it is busy", blame=False)
        elif isinstance(message, protocol.Failed):
            self._failed(attempt, message.reason)
        elif isinstance(message, protocol.Lost):
            self._failed(attempt, "it has lost the cache")

    def _accept(self, attempt: Attempt, tensors: Sequence[Tensor]) -> None:
        """Use a server's result, if it is the first one."""
        if not self._commit(attempt.work, tensors, partial(self._links.credit, attempt)):
            self._wasted += 1

    def _failed(self, attempt: Attempt, reason: str, blame: bool = True) -> None:
        """Let a task be tried again, unless another attempt goes on, or nobody waits for it."""
        work = attempt.work
        work.reason = f"{attempt.address}: {reason}"
        if blame:
            work.avoid.add(attempt.address)
            work.failures += 1
        if work.settled or attempt.late or any(not x.late for x in work.attempts):
            return
        self._retried += 1
        if work.place is None:
            self._pending.appendleft(work)
        elif blame:
            self.steps.lose(work)
        else:
            self.steps.wait(work)

    def _commit(
        self, work: PendingWork, tensors: Sequence[Tensor], count: Callable[[], None]
    ) -> bool:
        """Count a task's result and give it to who waits, unless the task has one."""
        self._links.cancel_all(work)
        if work.settled or not work.future.set_running_or_notify_cancel():
            return False
        self._works.remove(work)
        self._progress = time.monotonic()
        count()
        work.future.set_result(tuple(x.to(work.device) for x in tensors))
        return True

    def _give_up(self, work: PendingWork, error: BaseException) -> None:
        if not work.settled and work.future.set_running_or_notify_cancel():
            work.future.set_exception(error)
        if work in self._works:
            self._works.remove(work)

    def _assign(self, now: float) -> None:
        """Send waiting tasks, the first one first, each to the server that has it done soonest."""
        self.steps.assign(now)
        waiting: deque[PendingWork] = deque()
        while self._pending:
            work = self._pending.popleft()
            if work.settled:
                continue
            if not self._links.any_able(work) and self._leave_servers(work):
                continue
            if self._home.helps(work, self._links):
                self._home.take(work)
            elif (link := self._links.choose(work, now)) is not None:
                self._send(work, link)
            else:
                waiting.append(work)
                if not self._links.any_free(now):
                    break
        waiting.extend(self._pending)
        self._pending = waiting

    def _send(self, work: PendingWork, link: ServerLink) -> None:
        link.start(work)
        if (reason := link.progress()) is not None:
            self._lose(link, reason)

    def _leave_servers(self, work: PendingWork) -> bool:
        """Compute a task at home, or fail it; False if servers are to be asked again."""
        if self._has_home:
            self._home.take(work)
        elif work.failures >= _MOST_FAILURES:
            self._give_up(work, ServersError(f"no server computed a task: {work.reason}"))
        else:
            work.avoid.clear()
            return False
        return True

    def _beat(self, now: float) -> None:
        """Look at all deadlines."""
        for link in self._links:
            if (reason := link.beat(now)) is not None:
                self._lose(link, reason)
        deadlines = self._deadlines
        for work in list(self._works):
            waited = now - max(work.submitted, self._progress)
            if waited > deadlines.hedge:
                waited -= self._links.allowance(work)
            if work.settled:  # cancelled
                self._works.remove(work)
            elif work.place is not None:
                self.steps.look_at(work, now)
            elif waited > deadlines.give_up:
                reason = f"a task has no result after {waited:.0f} s: {work.reason}"
                self._give_up(work, ServersError(reason))
            elif waited > deadlines.hedge and self._has_home and not work.at_home:
                self._home.take(work)
            else:
                self._look_at(work, now)

    def _look_at(self, work: PendingWork, now: float) -> None:
        """Give up attempts that are late, and ask a second server where one takes long."""
        if self._links.end_late(work, now, self._deadlines.request):
            self._retried += 1
            self._pending.appendleft(work)
        if work.hedged or len(work.attempts) != 1 or work.at_home or self._pending:
            return
        (attempt,) = work.attempts
        seconds = now - attempt.started - self._links.allowance(work)
        if not attempt.late and self._hedging.is_late(work.cost, seconds):
            link = self._links.choose(work, now, but=attempt.address)
            if link is not None and not link.attempts:
                work.hedged = True
                self._hedged += 1
                self._send(work, link)
