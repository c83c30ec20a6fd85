"""Start the processes of a training, replace dead ones, and choose the next group's members."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from seqpar.comm.faults.process_state_server import STOPPED, state
from seqpar.comm.launch import Store
from seqpar.elastic.messages import Place, ProcessReport, newest, place_key, report_key

_POLL_SECONDS = 0.05
_log = logging.getLogger("seqpar")


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    reports: int = 0
    report: ProcessReport | None = None  # the report that has no answer yet


@dataclass(frozen=True)
class LauncherLimits:
    """The numbers of processes that a launcher starts, and the seconds for which it waits."""

    ranks: int  # the number of processes of the first group, and the largest number of any group
    spares: int = 0  # the number of processes that wait for a place
    restarts: int = 0  # the largest number of processes that are started in place of dead ones
    min_ranks: int = 1  # the fewest ranks of a group
    wait: float = 0.0  # seconds for which a group with fewer than `ranks` waits for spares
    patience: float = 60.0  # seconds after which a member that has not reported is killed

    def __post_init__(self) -> None:
        for name in ("ranks", "min_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_ranks > self.ranks:
            raise ValueError(f"min_ranks must be at most {self.ranks}, got {self.min_ranks}")
        for name in ("spares", "restarts", "wait", "patience"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


class Launcher:
    """Starts and replaces the processes of a training, which call `seqpar.elastic.steps`, and keeps
    their store.

    Each process of a group reports when the group's training is over or has failed. When all live
    processes have reported, the launcher gives each of them a rank in the next group. A spare,
    which is a process without a rank, gets the rank of a dead process. If there is no spare, the
    next group is smaller. Spares that start later join a group after the next failure. When no
    process of a group is left, the training ends.
    """

    def __init__(
        self, store: Store, start: Callable[[int], subprocess.Popen[bytes]], limits: LauncherLimits
    ) -> None:
        """`start(number)` must start a process, with the store and the number in `VARIABLE`."""
        self._store, self._start, self._limits = store, start, limits
        self._workers: dict[int, _Worker] = {}
        self._members: list[int] = []  # the processes of the current group, by rank
        self._started = self._generation = 0
        self._restarts = limits.restarts
        self._codes: dict[int, int] = {}  # the exit codes of processes that have ended
        self._since: float | None = None  # the time at which the first member reported
        self._ended = ""
        # The members of the last group, which were told that the training has ended.
        self._last_members: list[int] = []

    def run(self) -> int:
        """Run the training. Returns 0 if it is done.

        Returns 1 if the training cannot continue, or if a rank's script fails after the last step.
        """
        try:
            for _ in range(self._limits.ranks + self._limits.spares):
                self._add()
            while self._workers:
                self.tick()
                time.sleep(_POLL_SECONDS)
            failed = any(self._codes[number] for number in self._last_members)
            return 0 if self._ended == "done" and not failed else 1
        finally:
            for worker in self._workers.values():
                worker.process.kill()

    def tick(self) -> None:
        """Check all processes and their reports once. If all processes have reported, form a
        group.
        """
        for number in list(self._workers):
            code = self._workers[number].process.poll()
            if code is not None:
                del self._workers[number]
                self._codes[number] = code
                if self._restarts and code and not self._ended:
                    self._restarts -= 1
                    self._add()
        for number, worker in self._workers.items():
            key = report_key(number, worker.reports + 1)
            if worker.report is None and self._store.check([key]):
                worker.report = ProcessReport(*json.loads(self._store.get(key)))
                worker.reports += 1
        if self._ended:
            return
        if self._members and not self._workers.keys() & set(self._members):
            # The training ends, because spares have no checkpoint. It counts as done if all members
            # exited with 0, which a script can do before its last step.
            lost = any(map(self._codes.get, self._members))
            self._end("lost" if lost else "done", self._reports())
        elif self._complete():
            self._form()

    def _add(self) -> None:
        self._started += 1
        self._workers[self._started] = _Worker(self._start(self._started))

    def _complete(self) -> bool:
        """Return whether the launcher can answer the reports of all processes now.

        Kills members of the group that have not reported in time, and ends the training if too few
        processes are left.
        """
        ready = self._reports()
        present = [number for number in self._members if number in self._workers]
        late = [number for number in present if number not in ready]
        if not ready or (present and len(late) == len(present)):
            self._since = None  # no member has reported: the group runs steps or is starting
            return False
        now = time.monotonic()
        done = bool(present) and all(ready[x].done for x in present if x in ready)
        self._since = now if self._since is None or done else self._since
        waited = now - self._since
        for number in late:
            process = self._workers[number].process
            impatient = not done and waited > self._limits.patience
            if impatient or state(process.pid) == STOPPED:
                _log.warning("process %d does not report, and is killed", number)
                process.kill()
        if late or done or (present and len(present) == len(self._members)):
            return not late
        starting = len(ready) < min(len(self._workers), self._limits.ranks)
        patient = not self._members or len(ready) < self._limits.min_ranks
        if starting and (patient or waited < self._limits.wait):
            return False
        if len(ready) < self._limits.min_ranks:
            self._end("too few", ready)
            return False
        return True

    def _reports(self) -> dict[int, ProcessReport]:
        return {n: w.report for n, w in self._workers.items() if w.report is not None}

    def _form(self) -> None:
        """Answer the reports of all processes: form a group, or end the training."""
        reports = self._reports()
        survivors = [number for number in self._members if number in reports]
        if survivors and all(reports[number].done for number in survivors):
            self._end("done", reports)
        elif survivors and len(survivors) == len(self._members):
            self._end("unchanged", reports)
        else:
            self._regroup(reports)

    def _regroup(self, reports: dict[int, ProcessReport]) -> None:
        spares = [number for number in reports if number not in self._members]
        members: list[int | None] = [x if x in reports else None for x in self._members]
        members += [None] * (self._limits.ranks - len(members))
        filled = [spares.pop(0) if x is None and spares else x for x in members]
        self._members = [number for number in filled if number is not None]
        self._generation += 1
        source, lacking = newest([reports[number].finished for number in self._members])
        for rank, number in enumerate(self._members):
            ranks = len(self._members)
            self._answer(number, Place("", self._generation, rank, ranks, source, lacking))
        self._since = None

    def _end(self, why: str, ready: Collection[int]) -> None:
        """End the training, and kill processes that have not reported."""
        self._ended = why
        self._last_members = [number for number in self._members if number in ready]
        for number, worker in self._workers.items():
            if number in ready:
                self._answer(number, Place(why))
            else:
                worker.process.kill()

    def _answer(self, number: int, place: Place) -> None:
        worker = self._workers[number]
        self._store.set(place_key(number, worker.reports), json.dumps(place))
        worker.report = None
