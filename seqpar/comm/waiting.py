"""Wait for a long computation of one rank at the group's store, and not in a collective.

A collective fails, or aborts the process, after the group's timeout. Here the waiting ranks read
from the store that rank 0 is still computing, and have a time limit of their own. They log how much
time has passed, and raise a `PeerError` if rank 0 dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from seqpar.comm.faults.heartbeat import (
    MAX_ROUNDS_PER_SECOND,
    Heartbeat,
    heartbeat_for_a_while,
)
from seqpar.comm.faults.store_connection import Connection, answer_of
from seqpar.comm.messages.comm import Comm
from seqpar.core.torch_private import timeout_of

FIRST_LINE_SECONDS = 3.0  # seconds until the first line in the log
NEXT_LINE_SECONDS = 10.0  # seconds between two lines in the log
# Seconds in which the store must answer, or the group's timeout if it is shorter.
ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.1  # seconds between two reads of the store
_SLACK_SECONDS = 60.0  # seconds that are added to the limit of rank 0's work, while rank 0 lives
_log = logging.getLogger("seqpar")
T = TypeVar("T")


class Progress:
    """Logs at intervals how long some work has taken. `doing` describes the work and may change."""

    def __init__(self, doing: str, limit: float | None = None) -> None:
        self.doing, self._limit = doing, limit
        self._began, self._next = time.monotonic(), FIRST_LINE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def tick(self) -> None:
        if self.seconds >= self._next:
            most = "" if self._limit is None else f", at most {self._limit:.0f} s"
            _log.warning("%s: %.0f s so far%s", self.doing, self.seconds, most)
            self._next = self.seconds + NEXT_LINE_SECONDS


def bounded(work: Callable[[], T], doing: str, limit: float) -> T:
    """Return `work()`, which runs in a thread. Raise a TimeoutError after `limit` seconds.

    Work that is late continues in its thread until the process ends, so it must not change shared
    state. Errors of the work are raised here.
    """
    results: list[T] = []
    faults: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            results.append(work())
        except BaseException as fault:  # errors of all kinds, because the caller raises them
            faults.append(fault)

    thread, progress = threading.Thread(target=run, daemon=True), Progress(doing, limit)
    thread.start()
    while thread.is_alive() and progress.seconds < limit:
        thread.join(min(_POLL_SECONDS, limit))
        progress.tick()
    if faults:
        raise faults[0]
    if not results:
        raise TimeoutError(f"{doing}: not done after {limit:.0f} s")
    return results[0]


def while_others_wait(comm: Comm, work: Callable[[], T], doing: str, limit: float) -> T | None:
    """Return `work()` on rank 0. Other ranks wait until rank 0 has finished, and return None.

    All ranks call this function together. `work` must end within `limit` seconds. The group's
    timeout applies until rank 0 begins. After `limit`, the waiting ranks wait for the group's
    timeout again, or a minute if that is longer. If a rank dies meanwhile, the waiting ranks raise
    a `PeerError`.
    """
    group = comm._group()
    if group is None or comm.size == 1:
        return work() if comm.rank == 0 else None
    uses = _uses.setdefault(group, Counter())
    uses[comm.name] += 1
    begun, done = (f"seqpar {x} {comm.name} {uses[comm.name]}" for x in ("begun", "done"))
    timeout = timeout_of(group, comm.device)
    store = _Store(group, min(ANSWER_SECONDS, timeout.total_seconds()))
    # A group that sends from GPUs has no heartbeat.
    heartbeat = comm._heartbeat or heartbeat_for_a_while(group, done, comm.device)
    try:
        if comm.rank == 0:
            try:
                with suppress(RuntimeError):  # if the store is gone, the next message reports it
                    store.set(begun, "1")
                return work()
            finally:
                with suppress(RuntimeError):
                    store.set(done, "1")
        poll = max(_POLL_SECONDS, comm.size / MAX_ROUNDS_PER_SECOND)
        with heartbeat.blame_on_failure(f"a wait: {doing}", {comm._order[0]}, "the wait"):
            _wait(store, heartbeat, (begun, done), doing, limit, timeout, poll)
        return None
    finally:
        if heartbeat is not comm._heartbeat:
            heartbeat.stop()


class _Store:
    """A group's store. Each call, which may connect, raises a RuntimeError after `seconds`."""

    def __init__(self, group: torch.distributed.ProcessGroup, seconds: float) -> None:
        self._store, self._seconds = group.get_group_store(), seconds
        self._connection: Connection | None = None

    def set(self, key: str, value: str) -> None:
        answer_of(lambda: self._connected().set(key, value), self._seconds)

    def check(self, key: str) -> bool:
        return answer_of(lambda: self._connected().check([key]), self._seconds)

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(self._store)
        return self._connection


def _wait(
    store: _Store,
    heartbeat: Heartbeat,
    keys: tuple[str, str],
    doing: str,
    limit: float,
    timeout: timedelta,
    poll: float,
) -> None:
    """Return when rank 0 has finished.

    Raises a RuntimeError if rank 0 is late, a rank died, or the store does not answer.
    """
    begun, done = keys
    progress, began = Progress(doing, limit), False
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(done):
        if heartbeat.verdict:
            raise RuntimeError("another rank failed")
        if not began and store.check(begun):
            began, progress = True, Progress(doing, limit)
            end = time.monotonic() + limit + max(timeout.total_seconds(), _SLACK_SECONDS)
        if began:
            progress.tick()
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0 {'did not finish' if began else 'did not begin'} in time")
        time.sleep(min(poll, timeout.total_seconds() / 40))


_uses: WeakKeyDictionary[torch.distributed.ProcessGroup, Counter[str]] = WeakKeyDictionary()
