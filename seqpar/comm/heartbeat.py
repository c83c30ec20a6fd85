"""Heartbeats: find which rank of a group died, left or never joined, so that all others name it.

When a rank dies, gloo tells the ranks that wait for it an address, and the ranks that wait for
these ranks nothing. So each rank of a group has a thread that makes a round at least once a second,
and speaks to the others through the group's key-value store:

    key            written by                     value
    "beat RANK"    that rank, in every round      "COUNT DOING": a count that grows, and the
                                                  exchange that the rank waits in, if any, as in
                                                  "17 call 3, step 2 of ring backward"; or "left",
                                                  once the rank has dropped the group, or
                                                  ended, without an accident
    "verdict"      the first rank that finds      who is to blame: the beginning of every rank's
                   somebody to blame              error message

In a round a rank writes its own beat. If it waits for messages, it also looks for a verdict. If
there is one, the rank adopts it. If not, it reads all beats and judges (`Witness.judge`). Should it
find somebody to blame, it writes the verdict, by compare_set, so that of two verdicts at the same
time the first counts. All ranks then blame the same one, although those that raise and exit fall
silent later too.

A rank that has a verdict interrupts its waits. gloo also makes a wait fail by itself: when the
connection to a peer closes, or when the group's timeout is over. `Heartbeat.blame_on_failure` then
calls for a round at once, waits for a verdict, and raises a `PeerError` that begins with it. If
none comes in the time in which a silent rank would have been found, the store itself is to blame.

Silence is counted in reads of an unchanged beat, and not timed, so that nobody is blamed after a
machine has been suspended as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

ROUNDS = 40  # a group's timeout has at least so many; and each second has at least one
SILENT = 10  # reads in a row of an unchanged beat after which a rank counts as dead
LEFT = "left"  # the last beat of a rank that ended, or dropped the group, without an accident


class PeerError(RuntimeError):
    """A rank of the group died, left, or did not join the exchange.

    The message names that rank, the step that failed, and who waited for whom.
    """


class Store(Protocol):
    """The methods of torch.distributed's store that heartbeats use."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Clock:
    """The clock that heartbeats use. Tests replace it by one whose time passes at once."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(
        self, changed: threading.Condition, done: Callable[[], object], seconds: float
    ) -> None:
        """Wait until `done()`, which `changed` announces, but at most so many seconds."""
        changed.wait_for(done, seconds)


class Witness:
    """What one rank has heard of the others, and whom that shows to be to blame."""

    def __init__(self, rank: int, names: Sequence[str], interval: float) -> None:
        """Listen for `rank`.

        `names` is what messages call each rank, and `interval` the seconds between two reads.
        """
        self._names, self._interval = names, interval
        self.others = [peer for peer in range(len(names)) if peer != rank]
        self.beats: dict[int, str] = {}  # of those that have begun, as last heard
        # In how many reads in a row a rank's beat has not changed.
        self._silent: dict[int, int] = {}
        # None until one of this rank's waits has failed.
        self._heard_since_failure: set[int] | None = None

    def hear(self, beats: dict[int, str]) -> None:
        """Note the beats that the store has now, of those other ranks that have written one."""
        changed = {peer for peer, text in beats.items() if text != self.beats.get(peer)}
        self._silent = {
            peer: 0 if peer in changed else self._silent.get(peer, 0) + 1 for peer in self.others
        }
        self.beats = beats
        if self._heard_since_failure is not None:
            self._heard_since_failure |= changed

    def pause(self) -> None:
        """Forget the silence counted so far, since this rank stops listening."""
        self._silent.clear()

    def judge(self, failed: Sequence[frozenset[int]]) -> str:
        """Return who is to blame, and why, as the beginning of an error message; "" if nobody is.

        `failed` has the peers of each failed wait. Before a wait has failed, only a rank that had
        begun and fell silent is to blame: the others may yet begin, or have left because they had
        nothing more to do. Afterwards, in this order: one that has left, if all failed waits were
        for it; one that never began; one that is alive but in no exchange; and if there is no such
        rank, all wait for each other. A rank is alive if its beat has changed since the failure.
        """
        left = {peer for peer, text in self.beats.items() if text == LEFT}
        silent = [peer for peer in self.others if self._silent[peer] >= SILENT and peer not in left]
        if dead := [peer for peer in silent if peer in self.beats]:
            seconds = SILENT * self._interval
            return f"{self.listed(dead)} died or was stopped: no heartbeat for {seconds:.1f} s"
        if not failed:
            return ""
        if gone := left.intersection(*failed):
            return f"{self.listed(gone)} left the group"
        if silent:
            return f"{self.listed(silent)} died, or never made a module for this group"
        if self._heard_since_failure is None:
            self._heard_since_failure = set()
        if not self._heard_since_failure.issuperset(set(self.others) - left):
            return ""
        doing = {
            peer: text.partition(" ")[2] for peer, text in self.beats.items() if peer not in left
        }
        check = "did all ranks make the same call? check_ranks=True finds out"
        if idle := [peer for peer in doing if not doing[peer]]:
            listed = self.listed(idle)
            return f"{listed} is alive but did not send, and is in no exchange: {check}"
        waiting = "; ".join(f"{self._names[peer]} in {doing[peer]}" for peer in doing)
        return f"all ranks are alive but wait for each other ({waiting}): {check}"

    def listed(self, peers: Iterable[int]) -> str:
        """Return the names of some ranks, as in "rank 1 and rank 3"."""
        return " and ".join(self._names[peer] for peer in sorted(set(peers)))


@dataclass(eq=False)
class _Wait:
    """An exchange that this rank waits in, the peers that it waits for, and whether it failed."""

    doing: str
    peers: frozenset[int]
    failed: bool = False


class Heartbeat:
    """One rank's heartbeat in one group, which says who is to blame when messages do not arrive.

    After the first beat only its thread uses the store: a call may hang if the process that keeps
    the store does.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        timeout: float,
        interrupt: Callable[[], None],
        store_keeper: str,
        clock: Clock | None = None,
    ) -> None:
        """Write the first beat; `start` begins the rounds.

        `store` is a separate connection to the group's store; `store_keeper` says whose process
        keeps that. `names` is what messages call each rank. `timeout` is the group's, in seconds.
        `interrupt()` makes all waits on the group raise.
        """
        self._store, self._rank, self.names, self._name = store, rank, names, names[rank]
        self._interrupt, self._clock = interrupt, clock or Clock()
        self._interval = min(1.0, timeout / ROUNDS)
        self._witness = Witness(rank, names, self._interval)
        self._store_lost = (
            f"the store does not answer: {store_keeper}, which keeps it, died, left or was stopped"
        )
        self._count = 0
        self._changed = threading.Condition()  # guards what follows
        self._waits: list[_Wait] = []
        self._urgent = self._stopped = False
        self._verdict = ""
        self._round_began: float | None = None  # None between rounds
        self._write("")  # not in the thread: this rank may die before that runs
        name = f"seqpar heartbeat, {self._name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Make rounds, in a separate thread, until `stop`."""
        self._thread.start()

    @contextmanager
    def blame_on_failure(self, doing: str, peers: Iterable[int]) -> Iterator[None]:
        """Turn gloo's errors into a `PeerError` that says who is to blame.

        The context waits for messages to or from `peers`. `doing` names their exchange.
        """
        wait = _Wait(doing, frozenset(peers))
        with self._changed:
            self._waits.append(wait)
        try:
            yield
        except PeerError:  # of `accuse`
            raise
        except RuntimeError as error:
            if self._stopped:  # this rank destroyed the group
                raise
            listed = self._witness.listed(wait.peers)
            cause = self._cause(wait)
            # The others must read the verdict before this process ends, which may keep the store.
            self._clock.sleep(2 * self._interval)
            message = f"{cause}. {self._name} was in {doing} and waited for {listed}"
            raise PeerError(f"{message}. gloo said: {error}") from error
        finally:
            with self._changed:
                self._waits.remove(wait)

    def accuse(self, cause: str) -> str:
        """Publish `cause`, which this rank has found, as the verdict; return the one that counts.

        The other ranks have read it when this returns, unless they wait for nothing.
        """
        with suppress(RuntimeError):  # the store is gone: this rank raises its own cause
            cause = self._store.compare_set("verdict", "", cause).decode()
        self._adopt(cause)
        self._clock.sleep(2 * self._interval)
        return cause

    def stop(self) -> None:
        """Tell the others that this rank leaves, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1 + self._interval)  # not for ever: the store may hang

    def round(self) -> bool:
        """Write this rank's beat and, if it waits, listen to the others.

        Return whether there are to be more rounds.
        """
        with self._changed:
            stopped, waits = self._stopped, list(self._waits)
            self._urgent, self._round_began = False, self._clock.now()
        try:
            if stopped:
                self._store.set(f"beat {self._rank}", LEFT)
                return False
            self._write(waits[-1].doing if waits else "")
            self._listen(waits)
        except RuntimeError:  # the store is gone, which matters only if a wait fails
            self._adopt(self._store_lost)
            return False
        with self._changed:
            self._round_began = None
        return True

    def _run(self) -> None:
        while self.round():
            with self._changed:
                self._clock.wait_for(
                    self._changed, lambda: self._stopped or self._urgent, self._interval
                )

    def _cause(self, wait: _Wait) -> str:
        """Return the verdict once there is one; if none comes, the store is to blame."""
        with self._changed:
            wait.failed = self._urgent = True
            self._changed.notify_all()
            hung = 0.0 if self._round_began is None else self._clock.now() - self._round_began
            seconds = self._interval * (SILENT + 5) - hung
            self._clock.wait_for(self._changed, lambda: self._verdict, seconds)
            return self._verdict or self._store_lost

    def _write(self, doing: str) -> None:
        self._store.set(f"beat {self._rank}", f"{self._count} {doing}")
        self._count += 1

    def _listen(self, waits: list[_Wait]) -> None:
        """Adopt the others' verdict, or reach one; with a verdict, interrupt the waits."""
        if not waits:
            self._witness.pause()
            return
        if not self._verdict:
            if self._store.check(["verdict"]):
                self._adopt(self._store.multi_get(["verdict"])[0].decode())
            else:
                self._witness.hear(self._read())
                if verdict := self._witness.judge([wait.peers for wait in waits if wait.failed]):
                    self._adopt(self._store.compare_set("verdict", "", verdict).decode())
        if self._verdict and not all(wait.failed for wait in waits):
            self._interrupt()

    def _read(self) -> dict[int, str]:
        begun = [
            peer
            for peer in self._witness.others
            if peer in self._witness.beats or self._store.check([f"beat {peer}"])
        ]
        beats = self._store.multi_get([f"beat {peer}" for peer in begun]) if begun else []
        return {peer: text.decode() for peer, text in zip(begun, beats, strict=True)}

    def _adopt(self, verdict: str) -> None:
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()
