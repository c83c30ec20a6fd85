"""Heartbeats: if a rank has died, left or never joined a group, all other ranks raise an error that
names this rank.

gloo alone does not raise such errors on all ranks. When a rank dies, gloo raises an error only on
ranks that wait for the dead rank, and the error contains only an address. A rank that waits for a
living rank receives no error, even if the living rank can never send.

Each rank of a group therefore has a thread that runs a *round* at least once per second, or less
often with more than 4,096 ranks. The threads communicate through the key-value store of the group.
They write these keys:

* "state server RANK": the address of the rank's state server (`process_states.py`). The rank writes
  this key before its first beat.
* "beat RANK": a count, which the rank increases in every round. If the rank waits for messages, the
  name of the exchange follows, as in "17 call 3, step 2 of ring backward". If the rank has raised
  an error since its last wait, the error follows, as in "18 raised 1 ValueError: ...". When the
  rank has dropped the group or has ended normally, the value is "left".
* "verdict": which rank is at fault, and why. The first rank that finds this out writes the key. The
  error of every rank begins with this text.

In a round, a rank does the following:

1. It writes its beat.
2. If it waits for messages, it reads the verdict, and adopts the verdict if there is one.
3. Without a verdict, it reads the beats that it watches. In a small group, a rank watches the beats
   of all ranks. If the beat of a rank has not changed, the reader asks the operating system of the
   silent rank whether its process is alive. A living process may be silent because a call holds the
   interpreter lock.
4. It decides whether a rank is at fault (`Witness.judge`). If so, it writes the verdict with
   compare_set, so that the first verdict is never replaced. A single verdict is necessary because
   ranks that raise the error exit and become silent. Without the first verdict, other ranks would
   blame the ranks that have exited.

A rank with a verdict interrupts its waits. A wait on gloo can also fail before there is a verdict,
because a peer closes its connection, or because the group's timeout passes. After such a failure,
`Heartbeat.blame_on_failure` requests a round immediately, waits for a verdict, and raises a
`PeerError` that begins with the verdict. If no round ends within the time in which a silent rank
would be found, the store is at fault.

A rank does not measure silence with a clock. A rank counts how often it has read an unchanged beat,
and for how many intervals it has waited for the store. While a machine or a process is suspended,
these counts stand still, so a suspension blames no rank.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize  # also runs when a child process ends
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from seqpar.comm.faults.process_state_server import GONE
from seqpar.comm.faults.process_states import (
    UNKNOWN,
    Ask,
    ProcessStates,
    ask_state_servers,
    start_state_server,
)
from seqpar.comm.faults.store_connection import Connection, answer_of
from seqpar.comm.faults.witness import LEFT, MAX_SILENT_READS, RAISED, Witness, grace_seconds
from seqpar.core.torch_private import timeout_of

MIN_ROUNDS_PER_TIMEOUT = 40  # and at least one round per second
MAX_ROUNDS_PER_SECOND = 4096  # by all ranks of a group together, because they share the store
# After this number of intervals without an answer, the store counts as lost.
MAX_STORE_INTERVALS = MAX_SILENT_READS + 5
_MAX_ERROR_LETTERS = 400  # characters of an error's text in a beat
# this attribute of an error contains the ids of heartbeats that have reported it
_TOLD = "_seqpar_told"
_UNUSED_TAG = 0x5E9  # no message has this tag, so a receive with this tag times out


class PeerError(RuntimeError):
    """A rank of the group has died, has left, or has not joined the exchange.

    The text of the error names the rank at fault, the step that failed, and the ranks for whose
    messages the process was waiting.
    """


class Clock:
    """The clock of heartbeats. Tests replace it with a clock whose time passes immediately."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(
        self, changed: threading.Condition, done: Callable[[], object], seconds: float
    ) -> None:
        """Wait until `done()` is true, for at most `seconds`.

        `changed` is notified whenever `done()` may have become true.
        """
        changed.wait_for(done, seconds)


class Membership(NamedTuple):
    rank: int
    names: Sequence[str]  # the names by which errors call the ranks of the group
    timeout: float  # the group's timeout in seconds


@dataclass(eq=False)
class _Wait:
    doing: str
    peers: frozenset[int]
    failed: bool = False


class Heartbeat:
    """The heartbeat of one rank in one group. It finds the rank at fault when a wait fails.

    Heartbeats communicate through the key-value store of the group. If the process that keeps the
    store hangs, a call to the store may never return. Only the thread of the heartbeat and the
    method `accuse`, which limits how long it waits, therefore call the store.
    """

    def __init__(
        self,
        store: Connection,
        store_lost: str,
        member: Membership,
        interrupt: Callable[[], None],
        state_server: str,
        ask: Ask = ask_state_servers,
        clock: Clock | None = None,
    ) -> None:
        """Write to the store that this rank is alive. `start` starts the thread that repeats this.

        Args:
            store: this rank's connection to the store.
            store_lost: the cause that an error names if the store is gone.
            member: this rank and the group to which it belongs.
            interrupt: a function that makes all waits on the group raise an error.
            state_server: the address of this process's state server, or "" without a state server.
            ask: a function that asks state servers whether ranks are alive.
            clock: the clock of the heartbeat. Tests replace it.
        """
        rank, names, timeout = member
        self._store, self._store_lost = store, store_lost
        self._rank, self.names, self._name = rank, names, names[rank]
        self._interrupt, self._clock = interrupt, clock or Clock()
        self._interval = interval(timeout, len(names))
        self._grace = grace_seconds()
        grace = timeout if self._grace is None else self._grace
        self._witness = Witness(rank, names, self._interval, grace)
        self._states = ProcessStates(max(0.5, 2 * self._interval), ask)
        self._state_servers: dict[int, str] = {}
        self._count = 0
        self._round_ended = self._clock.now()
        self._changed = threading.Condition()  # protects the following attributes
        self._waits: list[_Wait] = []
        self._urgent = self._stopped = False
        self._verdict = ""
        # The text of the error that this rank has raised since its last wait, or "".
        self._error = ""
        self._errors = 0  # how many errors this rank has reported
        self._round_began: float | None = None  # None if no round is running
        # The first beat is not left to the thread, because the rank may die before the thread runs.
        self._store.set(f"state server {rank}", state_server)
        self._write("")
        name = f"seqpar heartbeat, {self._name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def blame_on_failure(
        self, doing: str, peers: Iterable[int], speaker: str = "gloo"
    ) -> Iterator[None]:
        """If a wait fails within this context, raise a `PeerError` that names the rank at fault.

        Args:
            peers: the ranks whose messages are awaited.
            doing: the name of the exchange.
            speaker: the backend that reports the failure, such as gloo.
        """
        wait = _Wait(doing, frozenset(peers))
        with self._changed:
            self._waits.append(wait)
            self._error = ""
        try:
            yield
        except PeerError:  # `accuse` has raised it
            raise
        except RuntimeError as error:
            if self._stopped:  # this rank has destroyed the group
                raise
            listed = self._witness.listed(wait.peers)
            cause = self._cause(wait)
            # This process may keep the store. It must not end before other ranks have read the
            # verdict.
            self._clock.sleep(2 * self._interval)
            message = f"{cause}. {self._name} was in {doing} and waited for {listed}"
            raise PeerError(f"{message}. {speaker} said: {error}") from error
        finally:
            with self._changed:
                self._waits.remove(wait)

    @property
    def verdict(self) -> str:
        """The text that names the rank at fault, or "" if this rank knows of none."""
        return self._verdict

    def accuse(self, cause: str) -> str:
        """Write the text `cause` as the verdict, which names the rank at fault. If there is a
        verdict already, keep it. Return the verdict.
        """
        publish = partial(self._store.compare_set, "verdict", "", cause)
        # The store is gone or hangs. This rank then raises an error with its own cause.
        with suppress(RuntimeError):
            cause = answer_of(publish, MAX_STORE_INTERVALS * self._interval).decode()
        self._adopt(cause)
        # Wait until the other ranks have had the time to read the verdict.
        self._clock.sleep(2 * self._interval)
        return cause

    def report(self, error: BaseException) -> None:
        """Tell other ranks that this rank has raised an error and will not join an exchange.

        Other ranks can read the report until this rank waits for messages again. A second report of
        the same error has no effect.
        """
        # The mark is an attribute of the error, because an error cannot be a key of a weak
        # dictionary.
        told = vars(error).setdefault(_TOLD, [])
        if isinstance(error, PeerError) or id(self) in told:
            return
        told.append(id(self))
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with self._changed:
            self._errors += 1
            self._error = f"{RAISED}{self._errors} {text[:_MAX_ERROR_LETTERS]}"
            self._urgent = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # The wait is limited because a call to the store may hang.
            self._thread.join(1 + self._interval)

    def round(self) -> bool:
        with self._changed:
            stopped, waits, error = self._stopped, list(self._waits), self._error
            self._urgent, self._round_began = False, self._clock.now()
        late = self._round_began - self._round_ended - self._interval
        stood_still = late >= MAX_SILENT_READS * self._interval
        try:
            if stopped:
                self._store.set(f"beat {self._rank}", LEFT)
                return False
            self._write(waits[-1].doing if waits else error)
            self._listen(waits, stood_still)
        except RuntimeError:  # The store is gone. This matters only if a wait fails.
            # Other ranks may have left because this rank seemed to be dead.
            still = f"{self._name} was stopped, or could not run Python, for {late:.1f} s; "
            self._adopt((still if stood_still else "") + self._store_lost)
            return False
        with self._changed:
            self._round_began, self._round_ended = None, self._clock.now()
        return True

    def _run(self) -> None:
        while self.round():
            with self._changed:
                self._clock.wait_for(
                    self._changed, lambda: self._stopped or self._urgent, self._interval
                )

    def _cause(self, wait: _Wait) -> str:
        """Wait until some rank has written which rank is at fault, and return this text.

        If the store of the group does not answer in time, the text says that the store is at fault.
        If this process was suspended during the wait, the store still has some time to answer.
        """
        with self._changed:
            wait.failed = self._urgent = True
            self._changed.notify_all()
            ended = self._round_ended
            hung = 0.0 if self._round_began is None else self._clock.now() - self._round_began
            left = max(
                MAX_STORE_INTERVALS - MAX_SILENT_READS,
                MAX_STORE_INTERVALS - int(hung / self._interval),
            )
            while left and not self._verdict:
                self._clock.wait_for(self._changed, lambda: self._verdict, self._interval)
                if self._round_ended == ended:
                    left -= 1
                else:
                    ended, left = self._round_ended, MAX_STORE_INTERVALS
            return self._verdict or self._store_lost

    def _write(self, doing: str) -> None:
        self._store.set(f"beat {self._rank}", f"{self._count} {doing}")
        self._count += 1

    def _listen(self, waits: list[_Wait], stood_still: bool) -> None:
        """Adopt the verdict of another rank, or decide on a verdict. Then interrupt all waits."""
        if not self._verdict and (waits or stood_still) and self._store.check(["verdict"]):
            self._adopt(self._store.multi_get(["verdict"])[0].decode())
        if not waits and self._witness.watches_all:  # ranks that wait read all beats
            self._witness.pause()
            return
        if not self._verdict:
            self._witness.hear(self._read(waits))
            failed, words = [wait.peers for wait in waits if wait.failed], self._words()
            # A stopped or busy rank is at fault only if other ranks wait for it.
            judges = waits or GONE in words.values()
            waited = {peer for wait in waits for peer in wait.peers}
            if judges and (verdict := self._witness.judge(failed, words, waited, self._errors)):
                self._adopt(self._store.compare_set("verdict", "", verdict).decode())
        if self._verdict and not all(wait.failed for wait in waits):
            self._interrupt()

    def _read(self, waits: list[_Wait]) -> dict[int, str]:
        begun = [
            peer
            for peer in self._witness.watch(wait.peers for wait in waits)
            if peer in self._witness.beats or self._store.check([f"beat {peer}"])
        ]
        return self._get("beat", begun)

    def _get(self, what: str, peers: list[int]) -> dict[int, str]:
        texts = self._store.multi_get([f"{what} {peer}" for peer in peers]) if peers else []
        return {peer: text.decode() for peer, text in zip(peers, texts, strict=True)}

    def _words(self) -> dict[int, str]:
        """Return whether the process of each silent rank is alive, stopped or gone.

        The operating system of the silent rank reports this. If it cannot be asked, the rank counts
        as gone after `grace_seconds` of silence, or immediately if `grace_seconds` is not set.
        """
        silent = self._witness.silent()
        servers = self._state_servers
        servers |= self._get("state server", [x for x in silent if x not in servers])
        words = self._states.of({x: servers[x] for x in silent if servers[x]})
        grace = self._grace or 0.0
        return {x: GONE if silent[x] >= grace else UNKNOWN for x in silent} | words

    def _adopt(self, verdict: str) -> None:
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()


def interval(timeout: float, ranks: int) -> float:
    """Return the seconds between two rounds of a rank, given the group's timeout and size."""
    return min(max(1.0, ranks / MAX_ROUNDS_PER_SECOND), timeout / MIN_ROUNDS_PER_TIMEOUT)


def heartbeat_in(group: ProcessGroup) -> Heartbeat | None:
    """Start this rank's heartbeat in a gloo group. Return None for other backends.

    The heartbeat stops when the group is freed or the process ends.
    """
    if group.size() == 1 or "cpu:gloo" not in dist.get_backend_config(group):
        return None
    alive = weakref.ref(group)
    interrupt = lambda: close_connections(alive())  # noqa: E731
    heartbeat = _started(group, group.get_group_store(), torch.device("cpu"), interrupt)
    # With an exit priority, this finalizer runs at exit as well. If the thread still ran at exit,
    # the process might abort.
    Finalize(group, heartbeat.stop, exitpriority=0)
    return heartbeat


def heartbeat_for_a_while(group: ProcessGroup, name: str, device: torch.device) -> Heartbeat:
    """Start a heartbeat for a single wait, in a group on any backend. The caller must stop it.

    All ranks must call this function together, with the same `name`. This heartbeat interrupts no
    waits. The code that waits must read the property `verdict`, which says which rank is at fault.
    """
    store = PrefixStore(f"{name}/", group.get_group_store())
    return _started(group, store, device, lambda: None)


def _started(
    group: ProcessGroup, at: Store, device: torch.device, interrupt: Callable[[], None]
) -> Heartbeat:
    ranks = dist.get_process_group_ranks(group)
    names = [
        f"rank {i}" if i == rank else f"rank {i} (global rank {rank})"
        for i, rank in enumerate(ranks)
    ]
    member = Membership(group.rank(), names, timeout_of(group, device).total_seconds())
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "the launcher" if agent else "global rank 0"
    lost = f"the store does not answer: {keeper}, which keeps it, died, left or was stopped"
    try:
        store = Connection.open(at, MAX_STORE_INTERVALS * interval(member.timeout, len(ranks)))
    except RuntimeError as error:
        doing = f"{names[member.rank]} was making a module for this group"
        raise PeerError(f"{lost}. {doing}. The store said: {error}") from error
    state_server = start_state_server(store.host)
    heartbeat = Heartbeat(store, lost, member, interrupt, state_server)
    heartbeat.start()
    return heartbeat


def close_connections(group: ProcessGroup | None) -> None:
    """Close all connections of a gloo group, so that all waits on the group raise an error.

    Waits end on this rank, and on ranks that wait for this rank.
    """
    if group is None:
        return
    unused = torch.empty(1, device="cpu")
    for step in range(1, group.size()):
        peer = (group.rank() + step) % group.size()
        try:
            group.recv([unused], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
