"""The processes that measure: a driver asks, ranks answer, and what breaks starts anew.

Alone, the driver starts all ranks as processes of this machine. Under a launcher each of its
processes has one rank as a process of its own, so that a rank may die, hang or fill its memory: the
driver, on process 0, then says why, and all ranks start again. They meet at a store.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from seqpar.comm.launch import LaunchedProcess, Store, store_of

MAX_START_SECONDS = 300.0
GRACE_SECONDS = 10.0  # for the other ranks after one has failed
_POLL_SECONDS = 0.01
_GONE_KEY = "seqpar/gone"
_ROOT = str(Path(__file__).parents[3])


class StartError(RuntimeError):
    """Ranks do not begin; the message says why."""


class PointError(Exception):
    """What was asked for could not be measured; the message says why.

    Attributes:
        late: whether that is because it took too long.
    """

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class SweepRequest(Protocol):
    """What a sweep asks."""

    def ready(self, ranks: int) -> None:
        """Have so many ranks, which may take a while."""
        ...

    def ask(self, ranks: int, task: dict[str, Any], limit: float) -> list[Any]:
        """Return the answer of each of so many ranks, or raise a PointError."""


class _Own:
    """The ranks that this process has started."""

    def __init__(self, ranks: Iterable[int], device: str, local: int | None) -> None:
        self._mine, self._device, self._local = list(ranks), device, local
        self._running: dict[int, tuple[subprocess.Popen[bytes], Any]] = {}

    def start(self, address: tuple[str, int], name: str, size: int) -> None:
        """Start those of `size` ranks that are this process's."""
        for rank in (rank for rank in self._mine if rank < size):
            device = "cpu"
            if self._device == "cuda":  # of which a launcher may show each process just its own
                local = rank if self._local is None else self._local
                device = f"cuda:{local % torch.cuda.device_count()}"
            said = tempfile.TemporaryFile()  # noqa: SIM115 (until it ends)
            words = [*address, name, rank, size, device, os.getpid()]
            path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
            threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
            process = subprocess.Popen(
                [sys.executable, "-m", "seqpar.bench.workers.worker", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | threads | {"PYTHONPATH": path},
            )
            self._running[rank] = process, said

    def lost(self) -> str | None:
        """Return which rank has ended, and what it said last; None if none has."""
        for rank, (process, said) in self._running.items():
            code = process.poll()
            if code is not None:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                return f"rank {rank} {_ended(code)}{': ' + lines[-1][:500] if lines else ''}"
        return None

    def stop(self) -> None:
        """End them."""
        for process, _ in self._running.values():
            process.kill()
        for process, said in self._running.values():
            process.wait()
            said.close()
        self._running = {}


def _ended(code: int) -> str:
    """Return how a process ended."""
    if code == -signal.SIGKILL:
        return "was killed, as the system does where memory is short"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


class RankProcesses:
    """The driver's side: use as a context, and `ask`."""

    def __init__(self, where: LaunchedProcess | None, most: int, device: str) -> None:
        """Meet the others; `most` is how many ranks there will be at once."""
        self._store, self._address = store_of(where)
        self._others = 0 if where is None else where.size - 1
        mine = range(most) if where is None else [0]
        self._own = _Own(mine, device, None if where is None else where.local)
        self._started = self._asked = self._size = 0

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.stop()
        _begin(self._store, self._started, 0)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._store.add(_GONE_KEY, 0) < self._others and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # the store may be this process's, and others still read it

    @property
    def _name(self) -> str:
        return f"seqpar/{self._started}"

    def _start(self, size: int) -> None:
        """Have so many ranks, and no others; raise a StartError if they do not begin."""
        self._own.stop()
        self._started, self._asked, self._size = self._started + 1, 0, size
        self._own.start(self._address, self._name, size)
        _begin(self._store, self._started - 1, size)
        ready = [f"{self._name}/ready/{rank}" for rank in range(size)]
        deadline = time.monotonic() + MAX_START_SECONDS
        while not self._store.check(ready):
            if (lost := self._lost()) is not None or time.monotonic() > deadline:
                raise StartError(
                    f"ranks do not begin: {lost or f'they took over {MAX_START_SECONDS:g} s'}"
                )
            time.sleep(_POLL_SECONDS)

    def _lost(self) -> str | None:
        lost, key = self._own.lost(), f"{self._name}/lost"
        if lost is None and self._store.check([key]):
            return str(self._store.get(key).decode())
        return lost

    def ready(self, ranks: int) -> None:
        """Have so many ranks."""
        if ranks != self._size:
            self._start(ranks)

    def ask(self, ranks: int, task: dict[str, Any], limit: float) -> list[Any]:
        """Return the answer of each rank to a task, or raise a PointError that says why not.

        After that ranks start anew, unless all of them refused the task and can go on.
        """
        self.ready(ranks)
        number, self._asked = self._asked, self._asked + 1
        keys = [f"{self._name}/answer/{number}/{rank}" for rank in range(ranks)]
        failed = f"{self._name}/failed/{number}"
        self._store.set(f"{self._name}/task/{number}", json.dumps(task))
        late = f"it took more than {limit:g} s"
        reason, deadline = None, time.monotonic() + limit
        while reason is None and not self._store.check(keys):
            time.sleep(_POLL_SECONDS)
            reason = self._lost()
            if reason is None and time.monotonic() > deadline:
                reason = "others did not go on" if self._store.check([failed]) else late
            if self._store.check([failed]):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        answers = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        for key in keys:
            self._store.delete_key(key)
        found = [answer["failed"] for answer in answers if "failed" in answer]
        if reason is None and not found:
            return [answer["value"] for answer in answers]
        if reason is not None or not all(answer.get("refused") for answer in answers):
            self._own.stop()
            self._size = 0
        # What others saw of it comes last.
        causes = [x for x in found if not x.startswith("PeerError")] + [reason] * bool(reason)
        raise PointError([*causes, *found][0], late=causes == [late])


def _begin(store: Store, number: int, size: int) -> None:
    """Tell the launcher's other processes to start ranks, or with size 0 to end."""
    store.set(f"seqpar/begin/{number}", str(size))


def follow(where: LaunchedProcess, device: str) -> None:
    """Have a rank, on a launcher's process that is not the driver's, until the driver ends it."""
    store, address = store_of(where)
    own, number = _Own([where.rank], device, where.local), 0
    try:
        while True:
            while not store.check([f"seqpar/begin/{number}"]):
                lost, key = own.lost(), f"seqpar/{number}/lost"
                if lost is not None and not store.check([key]):
                    store.set(key, lost)
                time.sleep(10 * _POLL_SECONDS)
            own.stop()
            size = int(store.get(f"seqpar/begin/{number}"))
            if not size:
                store.add(_GONE_KEY, 1)
                return
            number += 1
            own.start(address, f"seqpar/{number}", size)
    finally:
        own.stop()
