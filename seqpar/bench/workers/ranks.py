"""Start and supervise the processes of ranks.

The *driver* is the process that runs the sweep. It starts ranks as separate processes, sends them
requests, and reads their answers. If the sweep was started by a launcher such as torchrun, each
process of the launcher starts some of the ranks. If a rank crashes, hangs or runs out of memory,
the driver reports the reason, and all ranks restart.
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
from typing import IO, Any, Required, TypedDict

import torch

from seqpar.bench.workloads.workloads import WorkloadFields
from seqpar.comm.launch import LaunchedProcess, Store, store_of

MAX_START_SECONDS = 300.0
GRACE_SECONDS = 10.0  # how long other ranks have to answer after one rank has failed
_POLL_SECONDS = 0.01
_GONE_KEY = "seqpar/gone"
_ROOT = str(Path(__file__).parents[3])


class StartError(RuntimeError):
    """Ranks did not start. The message has the reason."""


class PointError(Exception):
    """A request failed. The message has the reason. `late` is True if the time limit was
    exceeded.
    """

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class RankRequest(TypedDict, total=False):
    """A request to ranks. Actions: "device", "links", "check", "costs" or "time"."""

    do: Required[str]
    workload: WorkloadFields
    contender: str


class _Own:
    def __init__(self, ranks: Iterable[int], device: str, local: int | None) -> None:
        self._ranks = list(ranks)
        self._device = device
        self._local = local
        self._running: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def start(self, address: tuple[str, int], name: str, size: int) -> None:
        """Start the ranks of a group of `size` ranks that this process of the launcher must
        start.
        """
        for rank in (rank for rank in self._ranks if rank < size):
            device = "cpu"
            if self._device == "cuda":  # a launcher can hide all but one GPU from each process
                local = rank if self._local is None else self._local
                device = f"cuda:{local % torch.cuda.device_count()}"
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the rank ends)
            words = [*address, name, rank, size, device, os.getpid()]
            path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
            threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
            process = subprocess.Popen(
                [sys.executable, "-m", "seqpar.bench.workers.rank", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | threads | {"PYTHONPATH": path},
            )
            self._running[rank] = process, output

    def lost(self) -> str | None:
        """Return the first rank that has ended, with its last line of output, or None."""
        for rank, (process, output) in self._running.items():
            code = process.poll()
            if code is not None:
                output.seek(0)
                lines = output.read().decode(errors="replace").strip().splitlines()
                return f"rank {rank} {_ended(code)}{': ' + lines[-1][:500] if lines else ''}"
        return None

    def stop(self) -> None:
        for process, _ in self._running.values():
            process.kill()
        for process, output in self._running.values():
            process.wait()
            output.close()
        self._running = {}


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, as the system does when memory is short"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


class RankProcesses:
    """The driver's ranks, as a context manager; `ask` sends them requests."""

    def __init__(self, where: LaunchedProcess | None, most: int, device: str) -> None:
        """Connect to the launcher's processes. `most` is the largest number of ranks in use."""
        self._store, self._address = store_of(where)
        self._others = 0 if where is None else where.size - 1
        mine = range(most) if where is None else [0]
        self._own = _Own(mine, device, None if where is None else where.local)
        self._started = 0  # the number of times that ranks were started
        self._asked = 0  # the number of requests since the last start
        self._size = 0  # number of running ranks

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.stop()
        _begin(self._store, self._started, 0)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._store.add(_GONE_KEY, 0) < self._others and time.monotonic() < deadline:
            # Other processes can still be reading a store of this process.
            time.sleep(_POLL_SECONDS)

    @property
    def _name(self) -> str:
        return f"seqpar/{self._started}"

    def ready(self, ranks: int) -> None:
        """Start this number of ranks, unless as many are already running.

        Raises a StartError if the ranks do not start.
        """
        if ranks == self._size:
            return
        self._own.stop()
        self._started += 1
        self._asked = 0
        self._size = ranks
        self._own.start(self._address, self._name, ranks)
        _begin(self._store, self._started - 1, ranks)
        ready = [f"{self._name}/ready/{rank}" for rank in range(ranks)]
        deadline = time.monotonic() + MAX_START_SECONDS
        while not self._store.check(ready):
            if (lost := self._lost()) is not None or time.monotonic() > deadline:
                reason = lost or f"they took over {MAX_START_SECONDS:g} s"
                raise StartError(f"ranks do not begin: {reason}")
            time.sleep(_POLL_SECONDS)

    def _lost(self) -> str | None:
        lost, key = self._own.lost(), f"{self._name}/lost"
        if lost is None and self._store.check([key]):
            return str(self._store.get(key).decode())
        return lost

    def ask(self, ranks: int, request: RankRequest, limit: float) -> list[Any]:
        """Send a request to the ranks, and return the answer of each rank.

        Raises a PointError if the request fails. Afterwards the ranks restart, unless all ranks
        have refused the request.
        """
        self.ready(ranks)
        number = self._asked
        self._asked += 1
        keys = [f"{self._name}/answer/{number}/{rank}" for rank in range(ranks)]
        failed = f"{self._name}/failed/{number}"
        self._store.set(f"{self._name}/request/{number}", json.dumps(request))
        late = f"it took more than {limit:g} s"
        reason, deadline = None, time.monotonic() + limit
        while reason is None and not self._store.check(keys):
            time.sleep(_POLL_SECONDS)
            reason = self._lost()
            if reason is None and time.monotonic() > deadline:
                reason = "other ranks did not continue" if self._store.check([failed]) else late
            if self._store.check([failed]):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        answers = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        for key in keys:
            self._store.delete_key(key)
        failures = [answer["failed"] for answer in answers if "failed" in answer]
        if reason is None and not failures:
            return [answer["value"] for answer in answers]
        if reason is not None or not all(answer.get("refused") for answer in answers):
            self._own.stop()
            self._size = 0
        # A PeerError is the consequence of a different rank's error, so it comes last.
        causes = [x for x in failures if not x.startswith("PeerError")] + [reason] * bool(reason)
        raise PointError([*causes, *failures][0], late=causes == [late])


def _begin(store: Store, number: int, size: int) -> None:
    """Tell the other processes of the launcher to start their ranks of a group of `size` ranks.
    With `size` 0, tell them to end.
    """
    store.set(f"seqpar/begin/{number}", str(size))


def follow(where: LaunchedProcess, device: str) -> None:
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
