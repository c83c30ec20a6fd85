"""Let all ranks wait for a computation on rank 0 that may take longer than the group's timeout.

The waiting ranks ask the group's store at intervals whether rank 0 has finished. They log how much
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

FIRST_LINE_SECONDS = 3.0  # seconds until the first log message
NEXT_LINE_SECONDS = 10.0  # seconds between two log messages
# The store must answer within this number of seconds, or within the group's timeout if that is
# shorter.
ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.1  # seconds between two reads of the store
_SLACK_SECONDS = 60.0  # added to the time limit of rank 0's work, as long as rank 0 is alive
_log = logging.getLogger("seqpar")
T = TypeVar("T")


class Progress:
    """Logs at intervals how long some work has taken. `doing` describes the work, and may be
    changed while the work runs.
    """

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
    """Run `work` in a thread and return its result. Raise a TimeoutError after `limit` seconds.

    After a TimeoutError, `work` continues in its thread until the process ends, so `work` must not
    change shared state. An error of `work` is raised in the calling thread.
    """
    results: list[T] = []
    faults: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            results.append(work())
        # all kinds of errors, because they are raised in the calling thread
        except BaseException as fault:
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
    """Run `work` on rank 0 while the other ranks wait. Return the result of `work` on rank 0, and
    None on all other ranks.

    All ranks must call this function together. The waiting ranks raise a `PeerError` in three
    cases:

    * Rank 0 does not begin within the group's timeout.
    * Rank 0 does not finish in time. It has `limit` seconds, and in addition the group's timeout or
      a minute, whichever is longer.
    * A rank dies.
    """
    group = comm._group()
    if group is None or comm.size == 1:
        return work() if comm.rank == 0 else None
    uses = _uses.setdefault(group, Counter())
    uses[comm.name] += 1
    begun, done = (f"seqpar {x} {comm.name} {uses[comm.name]}" for x in ("begun", "done"))
    timeout = timeout_of(group, comm.device)
    store = _Store(group, min(ANSWER_SECONDS, timeout.total_seconds()))
    # A group that sends from GPUs has no heartbeat, so one is started here.
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
    """A group's store whose calls raise a RuntimeError after `seconds`. The time for connecting
    counts too.
    """

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

    Raises a RuntimeError if rank 0 is late, if a rank has died, or if the store does not answer.
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
