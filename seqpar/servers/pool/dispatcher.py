"""The dispatcher of a pool, which sends each request to servers until the request has a result.

* *Work* is a request to a server: either a task of attention, or a decoding step that appends
  tokens to a cache on the server and computes attention over the cache.
* An *attempt* is work that was sent to one server.
* Work is *settled* when it has a result or an error, or was cancelled.
* A *retry* sends work again, after an attempt has failed or has missed its deadline.
* A *hedge* sends a task to a second server if the first server takes unusually long. The pool uses
  the result that arrives first.
* *Home* is this process. With the option `home`, this process computes tasks that no server
  computes.
* A *beat* is a check of all deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from seqpar.servers.pool.connection import (
    Answer,
    Attempt,
    CachePlace,
    Failure,
    PendingWork,
    PoolEndpoint,
)
from seqpar.servers.pool.discovery import Discovery, parse
from seqpar.servers.pool.known_servers import KnownServers
from seqpar.servers.pool.local_worker import ExitingError, LocalWorker
from seqpar.servers.pool.report import PoolReport
from seqpar.servers.transport.addresses import check_keys
from seqpar.servers.transport.certificates import ClientIdentity
from seqpar.servers.transport.choose import own_name, transports_of
from seqpar.servers.transport.event_loop import event_loop, in_event_loop, is_running, start
from seqpar.servers.transport.one_sided import OneSided
from seqpar.servers.wire.codec import Packed
from seqpar.servers.wire.limits import PoolOptions
from seqpar.servers.wire.payload import on_device
from seqpar.servers.wire.request import Request, ServersError

_log = logging.getLogger("seqpar")
# The time between two beats, while there is work and while there is none.
_BEAT_SECONDS, _IDLE_BEAT_SECONDS = 0.02, 0.1
_MAX_FAILURES = 3  # failed attempts after which a task has failed, if the pool has `home=False`
_MAX_STEPS_AT_ONCE = 2**20  # limit per server; the limit in a server's welcome is lower
_WRONG_ANSWER = "its answer was wrong"


def start_dispatcher(
    addresses: str | Sequence[str],
    keys: Path | None,
    transports: Sequence[str] | None,
    options: PoolOptions,
) -> Dispatcher:
    """Check the arguments of `ServerPool.connect`, start a pool, and wait for a ready server.

    If no server is ready within the deadline `connect`, the pool is returned nevertheless.
    """
    listed = parse(addresses)
    direct = "nixl" in transports_of(transports)
    identity = None if keys is None else ClientIdentity(keys)
    for i, address in enumerate(listed):
        if not address.startswith("file://"):
            check_keys(f"addresses[{i}]", address.replace("dns://", "tcp://"), identity)
    seconds = options.deadlines.connect
    name = own_name()
    endpoint = PoolEndpoint(name, identity, seconds, OneSided(f"seqpar-{name}") if direct else None)
    dispatcher = Dispatcher(KnownServers(endpoint, options.depth), options)
    discovery = Discovery(listed, identity is not None, dispatcher.serve_at)
    dispatcher.discovery = discovery
    dispatcher.start()
    if any(address.startswith(("file://", "dns://")) for address in listed):
        discovery.start()
    dispatcher.servers.wait_for_any(seconds)
    return dispatcher


class Inbox:
    """A queue of work and of function calls. Any thread can add to the queue. The event loop
    empties it.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        """The event loop calls `look` after work or a function call was added to the queue."""
        self.works: deque[PendingWork] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        self.ended: str | None = None  # why the inbox accepts nothing, or None if it is open
        self._look, self._lock = look, threading.Lock()

    def wake(self) -> None:
        event_loop().call_soon_threadsafe(self._look)

    def put(self, work: PendingWork) -> Answer:
        """Add work to the queue, and return the future of its result."""
        with self._lock:
            if self.ended is not None:
                raise ServersError(self.ended)
            self.works.append(work)
        self.wake()
        return work.future

    def call(self, call: Callable[[], None]) -> None:
        """Queue a function. The event loop calls the function when it empties the inbox next."""
        # This method must not take the lock. The garbage collector can call it at any moment, also
        # in a thread that holds the lock and would wait for itself.
        self.calls.append(call)

    def end(self, reason: str) -> None:
        """Refuse all further work for this reason. Only the first call of `end` sets the reason."""
        with self._lock:
            self.ended = self.ended or reason
        self.wake()


class StepLostError(Exception):
    """A server has lost a cache, or did not answer a decoding step."""

    def __init__(self, reason: str, blame: bool) -> None:
        super().__init__(reason)
        # Whether the server is at fault, because its session has not ended.
        self.blame = blame


class Dispatcher:
    """Sends the tasks and decoding steps of a pool to servers. The dispatcher runs in the event
    loop, and other threads submit tasks and steps.

    A decoding step can be computed only by the server that stores the step's cache. If this server
    loses the cache, the future of the step raises a StepLostError. The thread that waits for the
    future can then build the cache again on any server.
    """

    discovery: Discovery | None = None

    def __init__(self, servers: KnownServers, options: PoolOptions) -> None:
        self._running: Future[None] | None = None
        self._ended = asyncio.Event()
        self._copier = ThreadPoolExecutor(1, "seqpar-copies")  # copies results to GPUs
        self.options = options
        self.servers = servers
        self.inbox = Inbox(self._turn)
        self.local_worker = LocalWorker(self.inbox.wake, options.home_depth)
        self._stragglers = StragglerDetector(options.hedge_quantile)
        self._unfinished: list[PendingWork] = []  # all tasks and steps without a result
        self._unsent: deque[PendingWork] = deque()  # tasks that wait for a server
        self._unsent_steps: deque[PendingWork] = deque()  # steps that wait until a server is free
        self._last_commit = self._next_beat = 0.0
        self._retried = 0
        self._hedged = 0
        self._wasted = 0

    # --- Calls from other threads ---

    def submit(self, request: Request) -> Answer:
        return self.inbox.put(PendingWork.of(request))

    def submit_step(
        self, place: CachePlace, packed: Packed, device: torch.device, cost: int
    ) -> Answer:
        return self.inbox.put(PendingWork(None, packed, device, cost, place))

    def place_cache(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Reserve `nbytes` for a cache on a server whose address is not in `avoid`.

        Returns None if no such server has enough free memory.
        """
        if self.inbox.ended is not None:
            raise ServersError(self.inbox.ended)
        return self.servers.place(nbytes, avoid)

    def forget_cache(self, place: CachePlace, cache: int) -> None:
        def call() -> None:
            if (connection := self.servers.at(place)) is not None:
                connection.forget(cache)

        self.inbox.call(call)

    def count_at_home(self, cost: int) -> None:
        self.inbox.call(partial(self.local_worker.count, cost))

    def serve_at(self, addresses: Sequence[str]) -> None:
        self.inbox.call(partial(self._use, tuple(addresses)))
        self.inbox.wake()

    def report(self) -> PoolReport:
        waiting = len(self._unfinished) + len(self.inbox.works)
        counts = self._retried, self._hedged, self._wasted, waiting
        return PoolReport.of(list(self.servers), self.local_worker, *counts)

    def close(self) -> None:
        """End all sessions and the pool. Futures without a result raise an error."""
        if self.discovery is not None:
            self.discovery.end()
        self.inbox.end("the pool was closed")
        # If the caller is a callback of a future, this code runs in the event loop, which cannot
        # wait for itself.
        if self._running is not None and not in_event_loop():
            while is_running() and not wait([self._running], _BEAT_SECONDS).done:
                pass
            self.local_worker.close()
            self._copier.shutdown()

    # --- The loop ---

    def start(self) -> None:
        self._running = start(self._run())

    async def _run(self) -> None:
        """Check deadlines until the pool is closed or fails, and then end all sessions."""
        while self.inbox.ended is None:
            self._turn()
            most = _BEAT_SECONDS if self._unfinished else _IDLE_BEAT_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(most):
                    await self._ended.wait()
        for work in [*self._unfinished, *self.inbox.works]:
            self._give_up(work, ServersError(str(self.inbox.ended)))
        await self.servers.close()

    def _turn(self) -> None:
        """Process new work, results that this process computed, and expired deadlines. Afterwards,
        send work to servers.
        """
        if self.inbox.ended is not None:
            self._ended.set()
            return
        try:
            self._take_from_inbox()
            self._take_from_local_worker()
            now = time.monotonic()
            if now >= self._next_beat:
                self._next_beat = now + _BEAT_SECONDS
                for work in list(self._unfinished):
                    self._check_deadlines(work, now)
            self._assign(now)
        except Exception as error:
            self.on_error(error)

    def _take_from_inbox(self) -> None:
        while self.inbox.works:
            work = self.inbox.works.popleft()
            self._unfinished.append(work)
            (self._unsent if work.place is None else self._unsent_steps).append(work)
        while self.inbox.calls:
            self.inbox.calls.popleft()()

    def _take_from_local_worker(self) -> None:
        while self.local_worker.examined:
            attempt, tensors, is_right = self.local_worker.examined.popleft()
            # When a task is settled, its caller can change the inputs. A later check of a second
            # result for this task would compare against changed inputs, so its outcome is ignored.
            if is_right or attempt.work.settled:
                self._accept(attempt, tensors)
                continue
            # The address can have been removed and added again in the meantime, with a new
            # connection. The newest connection to the address is the one to distrust.
            if (connection := self.servers.get(attempt.connection.address)) is not None:
                connection.distrust(_WRONG_ANSWER)
            self._retry(attempt, _WRONG_ANSWER)
        while (finished := self.local_worker.finished()) is not None:
            work, outcome = finished
            if isinstance(outcome, Exception):
                self._give_up(work, outcome)
            elif outcome is not None:
                self._commit(work, outcome, partial(self.local_worker.count, work.cost))

    def _use(self, addresses: Sequence[str]) -> None:
        for connection in self.servers.use(addresses, self):
            connection.distrust("it is no longer listed")

    # --- Events of connections ---

    def on_result(self, attempt: Attempt, tensors: list[Tensor]) -> None:
        now, work = time.monotonic(), attempt.work
        # Steps are left out, because their time cannot be predicted from their cost.
        if work.place is None:
            attempt.connection.count(attempt, now)
            self._stragglers.count(work.cost, now - attempt.started)
        if self.options.sample and not work.settled:
            self.local_worker.examine(attempt, tensors, self.options.sample)
        else:
            self._accept(attempt, tensors)
        asyncio.get_running_loop().call_soon(self._turn)

    def on_failure(self, attempt: Attempt, failure: Failure) -> None:
        self._retry(attempt, failure.reason, failure.blame)
        if failure.lost:
            attempt.connection.restart(failure.reason)
        asyncio.get_running_loop().call_soon(self._turn)

    def on_change(self) -> None:
        self.servers.notify_changed()
        asyncio.get_running_loop().call_soon(self._turn)

    def _accept(self, attempt: Attempt, tensors: Sequence[Tensor]) -> None:
        count = partial(attempt.connection.count_used, attempt.work)
        if not self._commit(attempt.work, tensors, count):
            self._wasted += 1

    def _commit(
        self, work: PendingWork, tensors: Sequence[Tensor], count: Callable[[], None]
    ) -> bool:
        """Set the result of the future of `work`, call `count`, and return True.

        If the work had a result or an error already, or was cancelled, this method does nothing and
        returns False.
        """
        work.cancel_attempts()
        if work.settled or not work.future.set_running_or_notify_cancel():
            return False
        self._unfinished.remove(work)
        self._last_commit = time.monotonic()
        count()
        # A copy to a GPU waits for the GPU. It runs in another thread, so that it does not delay
        # the event loop of all pools.
        if work.device.type == "cuda":
            self._copier.submit(self._hand_over, work, tensors)
        else:
            self._hand_over(work, tensors)
        return True

    def _hand_over(self, work: PendingWork, tensors: Sequence[Tensor]) -> None:
        try:
            result = on_device(tensors, work.device)
        except RuntimeError as error:  # the GPU can raise this, for example if it is out of memory
            self._resolve(partial(work.future.set_exception, error))
        else:
            self._resolve(partial(work.future.set_result, result))

    def _resolve(self, resolve: Callable[[], None]) -> None:
        """Call `resolve`, which sets the result or the error of a future. An error in a callback of
        the future does not end the event loop.
        """
        try:
            resolve()
        except BaseException as error:  # for example SystemExit, raised by a callback
            self.on_error(error)

    def _retry(self, attempt: Attempt, reason: str, blame: bool = True) -> None:
        work = attempt.work
        work.reason = f"{attempt.connection.address}: {reason}"
        if blame:
            work.avoid.add(attempt.connection.address)
            work.failures += 1
        if work.settled or attempt.late or any(not x.late for x in work.attempts):
            return
        self._retried += 1
        if work.place is None:
            self._unsent.appendleft(work)
        elif blame:
            self._lose_step(work)
        else:
            self._unsent_steps.append(work)

    def _lose_step(self, work: PendingWork, blame: bool = True) -> None:
        self._give_up(work, StepLostError(work.reason, blame))

    def _give_up(self, work: PendingWork, error: BaseException) -> None:
        work.cancel_attempts()
        if not work.settled and work.future.set_running_or_notify_cancel():
            self._resolve(partial(work.future.set_exception, error))
        if work in self._unfinished:
            self._unfinished.remove(work)

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, ExitingError):
            self.inbox.end(str(error))
            return
        self.inbox.end(f"the pool has failed: {type(error).__name__}: {error}")
        _log.error("the pool has failed", exc_info=error)

    # --- Sending ---

    def _assign(self, now: float) -> None:
        """Send all work that can be sent now. Each task goes to the server that should finish it
        first.
        """
        self._assign_steps(now)
        waiting: deque[PendingWork] = deque()
        while self._unsent:
            work = self._unsent.popleft()
            if work.settled:
                continue
            if not self.servers.any_able(work) and self._leave_servers(work):
                continue
            if self.local_worker.helps(work, self.servers):
                self.local_worker.take(work)
            elif (connection := self.servers.choose(work, now)) is not None:
                connection.start(work)
            else:
                waiting.append(work)
                if not self.servers.any_free(now):
                    break
        waiting.extend(self._unsent)
        self._unsent = waiting

    def _assign_steps(self, now: float) -> None:
        waiting: deque[PendingWork] = deque()
        while self._unsent_steps:
            work = self._unsent_steps.popleft()
            if work.settled:
                continue
            assert work.place is not None
            connection = self.servers.at(work.place)
            if connection is None:
                self._lose_step(work, blame=False)
            elif not connection.accepts(work):
                work.reason = "it is above the limits of its server (--max-tokens, --max-bytes)"
                self._lose_step(work)
            elif connection.is_free(_MAX_STEPS_AT_ONCE, now):
                connection.start(work)
            else:
                waiting.append(work)
        self._unsent_steps = waiting

    def _leave_servers(self, work: PendingWork) -> bool:
        """Decide what happens to a task that none of the ready servers can compute.

        If the pool has `home=True`, this process computes the task. If it has `home=False`, the
        task fails after several failures of servers. Before that, this method returns False, and
        the pool tries all servers again.
        """
        if self.options.has_home:
            self.local_worker.take(work)
        elif work.failures >= _MAX_FAILURES:
            self._give_up(work, ServersError(f"no server computed a task: {work.reason}"))
        else:
            work.avoid.clear()
            return False
        return True

    # --- Deadlines ---

    def _check_deadlines(self, work: PendingWork, now: float) -> None:
        deadlines = self.options.deadlines
        waited = now - max(work.submitted, self._last_commit)
        if waited > deadlines.hedge:
            waited -= self.servers.allowance(work)
        if work.settled:  # cancelled
            work.cancel_attempts()
            self._unfinished.remove(work)
        elif work.place is not None:
            self._check_step_deadline(work, now)
        elif waited > deadlines.give_up:
            reason = work.reason or self.servers.why_none_is_ready()
            self._give_up(
                work, ServersError(f"a task has no result after {waited:.0f} s: {reason}")
            )
        elif waited > deadlines.hedge and self.options.has_home and not work.at_home:
            self.local_worker.take(work)
        else:
            if self._end_late_attempts(work, now):
                self._retried += 1
                self._unsent.appendleft(work)
            self._hedge(work, now)

    def _check_step_deadline(self, work: PendingWork, now: float) -> None:
        waited, limit = now - work.submitted, self.options.deadlines.request
        if waited > limit and waited > (limit := limit + self.servers.allowance(work)):
            work.reason = f"no answer within {limit:.3g} s"
            self._lose_step(work)

    def _end_late_attempts(self, work: PendingWork, now: float) -> bool:
        """Mark each attempt of `work` that has missed its deadline as late. An attempt is work that
        was sent to one server.

        Returns True if this call marked an attempt, and now all attempts of `work` are late.
        """
        any_ended = False
        for attempt in work.attempts:
            connection = attempt.connection
            limit = self.options.deadlines.request + connection.allowance
            if not attempt.late and connection.waited(attempt, now) > limit:
                attempt.late = True
                any_ended = True
                work.avoid.add(connection.address)
                work.reason = f"{connection.address}: no answer within {limit:.3g} s"
        return any_ended and all(attempt.late for attempt in work.attempts)

    def _hedge(self, work: PendingWork, now: float) -> None:
        if work.hedged or len(work.attempts) != 1 or work.at_home or self._unsent:
            return
        (attempt,) = work.attempts
        seconds = now - attempt.started - self.servers.allowance(work)
        if attempt.late or not self._stragglers.is_late(work.cost, seconds):
            return
        connection = self.servers.choose(work, now, but=attempt.connection.address)
        if connection is not None and not connection.attempts:
            work.hedged = True
            self._hedged += 1
            connection.start(work)


class StragglerDetector:
    """A detector of tasks that take more than `factor` times as long as a quantile of the last 256
    tasks.

    Tasks of different sizes are compared by their pace, in which `work` is the cost of a task:

        pace = seconds / (work + 1 + median work)
    """

    _KEPT_TASKS = 256
    _MIN_TASKS = 20  # no task is late before the detector has seen this many tasks
    _MIN_SECONDS = 0.02  # a shorter task is never late
    _FACTOR = 1.5  # a late task takes so many times the quantile of earlier tasks

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._tasks: deque[tuple[int, float]] = deque()  # pairs (work, pace), the oldest first
        self._sorted_work: list[int] = []
        self._sorted_pace: list[float] = []

    def count(self, work: int, seconds: float) -> None:
        if len(self._tasks) >= self._KEPT_TASKS:
            old_work, old_pace = self._tasks.popleft()
            del self._sorted_work[bisect_left(self._sorted_work, old_work)]
            del self._sorted_pace[bisect_left(self._sorted_pace, old_pace)]
        insort(self._sorted_work, work)
        pace = seconds / (work + self._constant())
        insort(self._sorted_pace, pace)
        self._tasks.append((work, pace))

    def is_late(self, work: int, seconds: float) -> bool:
        if len(self._tasks) < self._MIN_TASKS or seconds < self._MIN_SECONDS:
            return False
        usual = self._sorted_pace[int(self._quantile * (len(self._sorted_pace) - 1))]
        return seconds > self._FACTOR * usual * (work + self._constant())

    def _constant(self) -> int:
        # Without this constant, the pace of a task without work would be infinite.
        return 1 + self._sorted_work[len(self._sorted_work) // 2]
