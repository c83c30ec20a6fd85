"""Heartbeats: find the rank that died, left or never joined a group, so that all ranks name it.

When a rank dies, gloo gives the ranks that wait for it only an address. Ranks that wait for those
ranks learn nothing. Each rank of a group therefore has a thread that runs a *round* at least once a
second (with more than 4,096 ranks less often), and communicates through the group's key-value
store:

    key                  written by          value
    "state server RANK"  that rank, before   the address of its process-state server
                         any beat            (`process_state_server.py`)
    "beat RANK"          that rank, in       "COUNT DOING": a count that grows, and the exchange in
                         every round         which the rank waits, if any, such as "17 call 3, step
                                             2 of ring backward", or the error that it has raised
                                             since, as in "18 raised 1 ValueError: ..."; or "left",
                                             when the rank has dropped the group or ended normally
    "verdict"            the first rank      the cause: the beginning of every rank's error message
                         that finds a rank
                         at fault

In a round, a rank does the following:

1. It writes its beat.
2. If it waits for messages, it reads the verdict. If there is a verdict, the rank adopts it.
3. Otherwise the rank reads the beats that it watches, which are all beats in a small group. It asks
the operating systems whether silent ranks live, since a rank is also silent while a call holds the
interpreter lock.
4. It decides whether a rank is at fault (`Witness.judge`). If so, it writes the verdict with
compare_set, so that the first of two simultaneous verdicts counts. All ranks then blame the same
rank, although ranks that raise and exit fall silent later too.

A rank with a verdict interrupts its waits. gloo's waits also fail by themselves: when a peer closes
its connection, or after the group's timeout. `Heartbeat.blame_on_failure` then requests a round
immediately, waits for a verdict, and raises a `PeerError` that begins with the verdict. If no round
ends within the time after which a silent rank would be found, the store is at fault.

Silence is measured as the number of reads of an unchanged beat, and a wait for the store as a
number of intervals. No clock is used, so no rank is blamed after a machine or a rank was suspended.
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

MIN_ROUNDS_PER_TIMEOUT = 40  # and there is at least one round each second
MAX_ROUNDS_PER_SECOND = 4096  # of all ranks together, which share the store
MAX_STORE_INTERVALS = MAX_SILENT_READS + 5  # without an answer, before the store counts as lost
_MAX_ERROR_LETTERS = 400  # of an error's text that a beat contains
_TOLD = "_seqpar_told"  # attribute of errors: the ids of the heartbeats that reported them
_UNUSED_TAG = 0x5E9  # no message has this tag, so receiving with it times out


class PeerError(RuntimeError):
    """A rank of the group died, left, or did not join the exchange.

    The message names that rank, the step that failed, and the ranks for which this rank waited.
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

        `changed` is notified when it may be.
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
    """One rank's heartbeat in one group, which finds the rank at fault when a wait fails.

    A call of the store may never return if the process that keeps the store hangs. After the first
    beat, only the heartbeat's thread therefore uses the store, and `accuse`, which limits the time.
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
        """Write the first beat; `start` begins the rounds.

        `store_lost` is the cause to report if the store is gone. `interrupt()` makes all waits on
        the group raise. `state_server` is the address of this process's state server, or "".
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
        self._changed = threading.Condition()  # guards the following attributes
        self._waits: list[_Wait] = []
        self._urgent = self._stopped = False
        self._verdict = ""
        self._error = ""  # the text of the error that this rank has raised since its last wait
        self._errors = 0  # how many errors this rank has reported
        self._round_began: float | None = None  # None between rounds
        # Written here and not by the thread, since this rank may die before the thread runs.
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
        """Replace an error of a wait in this context by a `PeerError` that names the rank at fault.

        The context waits for messages to or from `peers`. `doing` names the exchange, and `speaker`
        the source of the error, such as gloo.
        """
        wait = _Wait(doing, frozenset(peers))
        with self._changed:
            self._waits.append(wait)
            self._error = ""
        try:
            yield
        except PeerError:  # raised after `accuse`, so it names the rank at fault
            raise
        except RuntimeError as error:
            if self._stopped:  # this rank destroyed the group
                raise
            listed = self._witness.listed(wait.peers)
            cause = self._cause(wait)
            # This process may keep the store. Other ranks must read the verdict before it ends.
            self._clock.sleep(2 * self._interval)
            message = f"{cause}. {self._name} was in {doing} and waited for {listed}"
            raise PeerError(f"{message}. {speaker} said: {error}") from error
        finally:
            with self._changed:
                self._waits.remove(wait)

    @property
    def verdict(self) -> str:
        """The cause that names the rank at fault, if this rank knows it; otherwise ""."""
        return self._verdict

    def accuse(self, cause: str) -> str:
        """Publish `cause` as the verdict, and return the verdict that counts.

        Another rank may have published a verdict before. Ranks that wait read the verdict that
        counts.
        """
        publish = partial(self._store.compare_set, "verdict", "", cause)
        with suppress(RuntimeError):  # the store is gone or hangs: this rank raises its own cause
            cause = answer_of(publish, MAX_STORE_INTERVALS * self._interval).decode()
        self._adopt(cause)
        self._clock.sleep(2 * self._interval)  # all ranks that wait read the verdict meanwhile
        return cause

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait for this rank of an error that keeps it from the next exchange.

        The error counts until this rank waits again. Reporting an error again has no effect.
        """
        told = vars(error).setdefault(_TOLD, [])  # since an error cannot be a key of a weak dict
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
        """Announce to the other ranks that this rank leaves, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1 + self._interval)  # not longer, since a call of the store may hang

    def round(self) -> bool:
        """Write this rank's beat and, if it waits, read others; return whether rounds follow."""
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
        except RuntimeError:  # the store is gone; it matters only if a wait fails
            # Other ranks may have left because this rank seemed dead.
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

        If no round ends meanwhile, the store is at fault. A round in progress counts from its
        beginning. This rank may have been stopped since then, so the store always has a few more
        intervals.
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
        """Adopt the verdict of another rank, or reach one. With a verdict, interrupt the waits."""
        if not self._verdict and (waits or stood_still) and self._store.check(["verdict"]):
            self._adopt(self._store.multi_get(["verdict"])[0].decode())
        if not waits and self._witness.watches_all:  # the waiting ranks read all beats
            self._witness.pause()
            return
        if not self._verdict:
            self._witness.hear(self._read(waits))
            failed, words = [wait.peers for wait in waits if wait.failed], self._words()
            # A rank that is stopped or busy is at fault only if others wait.
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
        """Return the states of silent ranks, as the ranks' operating systems report them.

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
    """Return the seconds between two rounds of a rank, from the group's timeout and size."""
    return min(max(1.0, ranks / MAX_ROUNDS_PER_SECOND), timeout / MIN_ROUNDS_PER_TIMEOUT)


def heartbeat_in(group: ProcessGroup) -> Heartbeat | None:
    """Start and return this rank's heartbeat in a group on gloo; return None for other groups.

    It stops when the group is freed or the process ends.
    """
    if group.size() == 1 or "cpu:gloo" not in dist.get_backend_config(group):
        return None
    alive = weakref.ref(group)
    interrupt = lambda: close_connections(alive())  # noqa: E731
    heartbeat = _started(group, group.get_group_store(), torch.device("cpu"), interrupt)
    # With an exit priority, this also runs at exit, which the thread might abort if it still ran.
    Finalize(group, heartbeat.stop, exitpriority=0)
    return heartbeat


def heartbeat_for_a_while(group: ProcessGroup, name: str, device: torch.device) -> Heartbeat:
    """Start and return a heartbeat for one wait in a group of any backend; the caller stops it.

    All ranks start a heartbeat with this `name` together. It interrupts no wait: the waiting code
    reads its `verdict`.
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
    """Make all waits on a gloo group raise, on this rank and on the ranks that wait for this rank.

    The group's abort() does not end waits, but a receive that times out closes all connections. If
    the connection to a peer is closed already, a receive from that peer fails without a timeout.
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
