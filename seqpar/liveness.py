"""Heartbeats: which rank of a group died, so that every other one can say so, and at which step.

gloo tells a dead rank's neighbour an address, and a rank that waits for that neighbour nothing. So each rank writes a beat
into the group's store and, while it waits for messages, reads the others'. Whoever first finds one silent publishes a
verdict: all ranks then blame the same one, although those that raise and exit fall silent later too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

BEATS = 40  # in the group's timeout, at least; and one a second, at least
SILENT = 10  # beats missed. They are counted, not timed: a machine that stood still as a whole blames nobody
LEFT = "left"  # the last beat of a rank that ended in order or dropped the group


class PeerError(RuntimeError):
    """A rank of the group died, left or did not come. The message names it, the step, and who waited for whom."""


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(eq=False)
class _Wait:
    doing: str
    peers: frozenset[int]
    failed: bool = False


class Heart:
    """One rank's beat in one group, and what it hears of the others.

    After the first beat only its thread touches the store, which may hang with the process that keeps it.
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], timeout: float, interrupt: Callable[[], None], host: str
    ) -> None:
        """`store` is the group's, but a connection of its own; `host` keeps it. `names` is what messages call each rank.
        `timeout` is the group's, in seconds. `interrupt()` makes what blocks in a wait on the group raise.
        """
        self._store, self._rank, self._names, self._interrupt = store, rank, names, interrupt
        self._interval = min(1.0, timeout / BEATS)
        self._lost = f"the store does not answer: {host}, which keeps it, died, left or was stopped"
        self._others = [peer for peer in range(len(names)) if peer != rank]
        self._saying: dict[int, str] = {}  # the beats of those that have begun, as last read
        self._silent: dict[int, int] = {}  # reads since it changed
        self._heard: set[int] | None = None  # whose has changed since a wait failed here, if one has
        self._changed = threading.Condition()  # guards what follows
        self._waits: list[_Wait] = []
        self._urgent = self._stopped = False
        self._verdict = ""
        self._asked = 0.0  # when the thread turned to the store; 0 while it sleeps
        self._beat("0 ")  # here, since this rank may die before the thread runs
        self._thread = threading.Thread(target=self._run, name=f"seqpar heartbeat, {names[rank]}", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, doing: str, peers: Iterable[int]) -> Iterator[None]:
        """While messages to or from `peers` are waited for: an error of gloo's becomes one that says who is to blame."""
        wait = _Wait(doing, frozenset(peers))
        with self._changed:
            self._waits.append(wait)
        try:
            yield
        except RuntimeError as error:
            if self._stopped:  # this rank destroyed the group
                raise
            here = f"{self._names[self._rank]} was in {doing} and waited for {self._list(peers)}"
            cause = self._cause(wait)
            time.sleep(2 * self._interval)  # others read the verdict before this process ends, which may keep the store
            raise PeerError(f"{cause}. {here}. gloo said: {error}") from error
        finally:
            with self._changed:
                self._waits.remove(wait)

    def stop(self) -> None:
        """Tell the others that this rank leaves, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(1 + self._interval)  # not for ever: the store may hang

    def _cause(self, wait: _Wait) -> str:
        with self._changed:
            wait.failed = self._urgent = True
            self._changed.notify_all()
            hung = time.monotonic() - self._asked if self._asked else 0.0
            self._changed.wait_for(lambda: self._verdict, self._interval * (SILENT + 5) - hung)
            return self._verdict or self._lost

    def _run(self) -> None:
        count = 1
        try:
            while not self._stopped:
                with self._changed:
                    waits, self._urgent, self._asked = list(self._waits), False, time.monotonic()
                self._beat(f"{count} {waits[-1].doing if waits else ''}")
                self._listen(waits)
                count += 1
                with self._changed:
                    self._asked = 0.0
                    self._changed.wait_for(lambda: self._stopped or self._urgent, self._interval)
            self._beat(LEFT)
        except RuntimeError:  # the store is gone, which matters only if a wait fails
            self._decide(self._lost)

    def _beat(self, text: str) -> None:
        self._store.set(f"beat {self._rank}", text)

    def _listen(self, waits: list[_Wait]) -> None:
        """Read the others' beats; if any is to blame, publish it, and end the waits."""
        if not waits:
            self._silent.clear()
            return
        if not self._verdict:
            if self._store.check(["verdict"]):
                self._decide(self._store.multi_get(["verdict"])[0].decode())
            else:
                self._read()
                if verdict := self._judge([wait for wait in waits if wait.failed]):
                    self._decide(self._store.compare_set("verdict", "", verdict).decode())
        if self._verdict and not all(wait.failed for wait in waits):
            self._interrupt()

    def _read(self) -> None:
        begun = [peer for peer in self._others if peer in self._saying or self._store.check([f"beat {peer}"])]
        said = self._store.multi_get([f"beat {peer}" for peer in begun]) if begun else []
        saying = {peer: text.decode() for peer, text in zip(begun, said, strict=True)}
        changed = {peer for peer in begun if saying[peer] != self._saying.get(peer)}
        self._silent = {peer: 0 if peer in changed else self._silent.get(peer, 0) + 1 for peer in self._others}
        self._saying = saying
        if self._heard is not None:
            self._heard |= changed

    def _judge(self, failed: list[_Wait]) -> str:
        """Who is to blame, or "" while nobody is. Before a wait has failed, only a rank that has begun and fell silent is:
        others may yet come, or have left because they had nothing more to do.
        """
        left = {peer for peer, text in self._saying.items() if text == LEFT}
        silent = [peer for peer in self._others if self._silent[peer] >= SILENT and peer not in left]
        if dead := [peer for peer in silent if peer in self._saying]:
            return f"{self._list(dead)} died or was stopped: no heartbeat for {SILENT * self._interval:.1f} s"
        if not failed:
            return ""
        if gone := left.intersection(*(wait.peers for wait in failed)):
            return f"{self._list(gone)} left the group"
        if silent:
            return f"{self._list(silent)} died, or never made a module for this group"
        if self._heard is None:
            self._heard = set()
        if not self._heard.issuperset(set(self._others) - left):
            return ""
        doing = {peer: text.partition(" ")[2] for peer, text in self._saying.items() if peer not in left}
        check = "did all ranks make the same call? check_ranks=True finds out"
        if idle := [peer for peer in doing if not doing[peer]]:
            return f"{self._list(idle)} is alive but did not send, and is in no exchange: {check}"
        waiting = "; ".join(f"{self._names[peer]} in {doing[peer]}" for peer in doing)
        return f"all ranks are alive but wait for each other ({waiting}): {check}"

    def _decide(self, verdict: str) -> None:
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def _list(self, peers: Iterable[int]) -> str:
        return " and ".join(self._names[peer] for peer in sorted(set(peers)))
