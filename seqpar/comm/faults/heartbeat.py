"""Heartbeats: find the rank that has died, left or never joined a group, so that all ranks name it.

When a rank dies, gloo raises an error only on ranks that wait for it, and gives only an address.
Ranks that wait for those ranks learn nothing. Each rank of a group therefore has a thread that runs
a *round* at least once per second (less often with more than 4,096 ranks). The threads communicate
through the key-value store of the group, in which they write these keys:

* "state server RANK" is written by the rank before any beat. The value is the address of its state
  server (`process_states.py`).
* "beat RANK" is written by the rank in every round. The value begins with a count that grows. If
  the rank waits, the exchange follows, as in "17 call 3, step 2 of ring backward". If it has raised
  an error since, the error follows, as in "18 raised 1 ValueError: ...". When the rank has dropped
  the group or has ended normally, the value is "left".
* "verdict" is written by the first rank that finds a rank at fault. The value is the cause, with
  which the error of every rank begins.

In a round, a rank does the following:

1. It writes its beat.
2. If it waits for messages, it reads the verdict. If there is one, the rank adopts it.
3. Otherwise it reads the beats that it watches, which in a small group are all beats. For ranks
   whose beats have not changed, it asks their operating systems whether they live. They may be
   silent only because a call holds the interpreter lock.
4. It decides whether a rank is at fault (`Witness.judge`). If so, it writes the verdict with
   compare_set, so that only the first of several verdicts counts. Without one common verdict, ranks
   would also blame ranks that have raised an error, exited, and are therefore silent.

A rank with a verdict interrupts its waits. gloo's waits also fail without a verdict: when a peer
closes its connection, or after the group's timeout. `Heartbeat.blame_on_failure` then requests a
round immediately and waits for a verdict. It raises a `PeerError` that begins with the verdict. If
no round ends in the time in which a silent rank would be found, the store is at fault.

Silence is counted in reads of an unchanged beat, and waiting for the store in intervals. No clock
is compared, so that no rank is blamed after a machine or a process was suspended.
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
from multiprocessing.util import Finalize  # unlike weakref's, it runs when a child process ends too
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

MIN_ROUNDS_PER_TIMEOUT = 40  # at least this number, and at least one round per second
MAX_ROUNDS_PER_SECOND = 4096  # of all ranks of a group together, because they share the store
# Intervals without an answer after which the store counts as lost.
MAX_STORE_INTERVALS = MAX_SILENT_READS + 5
_MAX_ERROR_LETTERS = 400  # characters of an error's text in a beat
_TOLD = "_seqpar_told"  # an attribute of errors: the ids of the heartbeats that have reported them
_UNUSED_TAG = 0x5E9  # no message has this tag, so receiving with it times out


class PeerError(RuntimeError):
    """A rank of the group has died, has left, or has not joined the exchange.

    The message names this rank, the step that failed, and the ranks for which the raising rank
    waited.
    """


class Clock:
    """The clock of heartbeats. Tests replace it by a clock whose time passes immediately."""

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
    """A rank's membership of a group."""

    rank: int
    names: Sequence[str]  # the names of the group's ranks in errors
    timeout: float  # the group's timeout in seconds


@dataclass(eq=False)
class _Wait:
    doing: str
    peers: frozenset[int]
    failed: bool = False


class Heartbeat:
    """The heartbeat of one rank in one group. It finds the rank at fault when a wait fails.

    If the process that keeps the store hangs, a call of the store may never return. After the first
    beat, the store is therefore used only by the thread of the heartbeat, and by `accuse`, which
    limits how long it waits.
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
        """Write the first beat. `start` begins the rounds.

        Args:
            store: this rank's connection to the store.
            store_lost: the cause to report if the store is gone.
            member: this rank and its group.
            interrupt: makes all waits on the group raise.
            state_server: the address of this process's state server, or "".
            ask: asks state servers whether ranks live.
            clock: replaced in tests.
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
        self._changed = threading.Condition()  # a lock for the following attributes
        self._waits: list[_Wait] = []
        self._urgent = self._stopped = False
        self._verdict = ""
        # The text of the error that this rank has raised since its last wait, or "".
        self._error = ""
        self._errors = 0  # how many errors this rank has reported
        self._round_began: float | None = None  # None while no round runs
        # This is written here and not by the thread, because the rank may die before the thread
        # runs.
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
        """If a wait within this context fails, raise a `PeerError` that names the rank at fault
        instead.

        Args:
            peers: the ranks whose messages are waited for.
            doing: the name of the exchange.
            speaker: who reports the error, such as gloo.
        """
        wait = _Wait(doing, frozenset(peers))
        with self._changed:
            self._waits.append(wait)
            self._error = ""
        try:
            yield
        except PeerError:  # `accuse` has raised it, so it names the rank at fault already
            raise
        except RuntimeError as error:
            if self._stopped:  # this rank has destroyed the group
                raise
            listed = self._witness.listed(wait.peers)
            cause = self._cause(wait)
            # This process may keep the store. Other ranks must read the verdict before the process
            # ends.
            self._clock.sleep(2 * self._interval)
            message = f"{cause}. {self._name} was in {doing} and waited for {listed}"
            raise PeerError(f"{message}. {speaker} said: {error}") from error
        finally:
            with self._changed:
                self._waits.remove(wait)

    @property
    def verdict(self) -> str:
        """The cause, which names the rank at fault, or "" if this rank does not know it."""
        return self._verdict

    def accuse(self, cause: str) -> str:
        """Publish `cause` as the verdict.

        Return the verdict that counts, which may be an earlier one.

        Ranks that wait read the verdict that counts.
        """
        publish = partial(self._store.compare_set, "verdict", "", cause)
        # The store is gone or hangs, and this rank raises its own cause.
        with suppress(RuntimeError):
            cause = answer_of(publish, MAX_STORE_INTERVALS * self._interval).decode()
        self._adopt(cause)
        # Gives all ranks that wait the time to read the verdict.
        self._clock.sleep(2 * self._interval)
        return cause

    def report(self, error: BaseException) -> None:
        """Tell ranks that wait for this rank about an error, because of which it does not join the
        exchange.

        The error counts until this rank waits again. Reporting the same error again has no effect.
        """
        # On the error itself, because an error cannot be a key of a weak dictionary.
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
        """Tell the other ranks that this rank leaves, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # Not longer, because a call of the store may hang.
            self._thread.join(1 + self._interval)

    def round(self) -> bool:
        """Run one round. Return whether further rounds follow."""
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
            # Other ranks may have left, because this rank seemed to be dead.
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
        """Return the verdict as soon as there is one.

        If no round ends meanwhile, the store is at fault. The time of a round that is running
        counts from its start. This rank may have been stopped since then, so the store always gets
        a few more intervals.
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
        """Adopt the verdict of another rank, or decide on one.

        With a verdict, interrupt all waits.
        """
        if not self._verdict and (waits or stood_still) and self._store.check(["verdict"]):
            self._adopt(self._store.multi_get(["verdict"])[0].decode())
        if not waits and self._witness.watches_all:  # the ranks that wait read all beats
            self._witness.pause()
            return
        if not self._verdict:
            self._witness.hear(self._read(waits))
            failed, words = [wait.peers for wait in waits if wait.failed], self._words()
            # A rank that is stopped or busy is only at fault if other ranks wait for it.
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
        """Return the states of silent ranks, as their operating systems report them.

        A rank without a state server counts as gone, unless the user has set a grace
        (`grace_seconds`).
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
    """Return the seconds between two rounds of a rank.

    They depend on the group's timeout and size.
    """
    return min(max(1.0, ranks / MAX_ROUNDS_PER_SECOND), timeout / MIN_ROUNDS_PER_TIMEOUT)


def heartbeat_in(group: ProcessGroup) -> Heartbeat | None:
    """Start and return this rank's heartbeat in a group on gloo. Return None for other groups.

    It stops when the group is freed or the process ends.
    """
    if group.size() == 1 or "cpu:gloo" not in dist.get_backend_config(group):
        return None
    alive = weakref.ref(group)
    interrupt = lambda: close_connections(alive())  # noqa: E731
    heartbeat = _started(group, group.get_group_store(), torch.device("cpu"), interrupt)
    # With an exit priority, this runs at exit as well. If the thread still ran then, exiting might
    # abort it.
    Finalize(group, heartbeat.stop, exitpriority=0)
    return heartbeat


def heartbeat_for_a_while(group: ProcessGroup, name: str, device: torch.device) -> Heartbeat:
    """Start and return a heartbeat for a single wait, in a group of any backend.

    The caller stops it.

    All ranks start a heartbeat with this `name` together. It interrupts no waits. The code that
    waits must read its `verdict`.
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
    """Make all waits on a gloo group raise, on this rank and on ranks that wait for it.

    gloo's abort() does not end waits. But when a receive times out, gloo closes all connections. If
    the connection to a peer is closed already, a receive from this peer fails immediately.
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
