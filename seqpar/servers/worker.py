"""The compute thread of a server: it takes what waits, of all clients in turn, several at once.

What is brief, and comes alone, the thread that reads it computes itself: to wake another one, and
be woken by it, would take as long.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from seqpar.servers.caches import CacheStep
from seqpar.servers.compute import compute
from seqpar.servers.payload import Bytes, bytes_of
from seqpar.servers.protocol import Step, Task
from seqpar.servers.request import Request

_BRIEF = 0.001  # seconds of a call for which the thread that reads may be kept from that
_KINDS = 256  # of which it is known what is brief


@dataclass(eq=False)
class Job:
    """A request that a server has taken.

    Attributes:
        client: whose it is.
        task: its header.
        request: what is to be computed; None once it is.
        size: the bytes that it takes, with its result.
        kind: what requests of one call have in common.
        arrived: when, by the monotonic clock.
        result: the bytes of the result, or None.
        error: why there is none.
        brief: whether the thread that reads computed it itself.
        seconds: what computing took, shared among the requests of the call by their work.
    """

    client: bytes
    task: Task | Step
    request: Request | CacheStep | None
    size: int
    kind: Hashable
    arrived: float = field(default_factory=time.monotonic)
    result: list[Bytes] | None = None
    error: str | None = None
    brief: bool = False
    seconds: float = 0.0


class Worker(threading.Thread):
    """Computes jobs, at most so many rows in a call.

    Attributes:
        done: jobs that have a result or an error, in order.
        busy_seconds: how long it has computed.
        batches: how many calls that was.
    """

    def __init__(self, device: torch.device, rows: int, on_done: Callable[[], None]) -> None:
        super().__init__(name="seqpar-compute", daemon=True)
        self.done: deque[Job] = deque()
        self.busy_seconds, self.batches = 0.0, 0
        self._device, self._rows, self._on_done = device, rows, on_done
        self._changed = threading.Condition()
        self._queues: OrderedDict[bytes, deque[Job]] = OrderedDict()
        self._waiting, self._computing, self._stopped = 0, False, False
        self._brief: dict[Hashable, int] = {}  # the most rows that a brief call had, by kind

    @property
    def waiting(self) -> int:
        """How many jobs nobody has begun."""
        return self._waiting

    def add(self, job: Job) -> None:
        """Let a job wait for its turn, which it gets from the next `proceed` on."""
        with self._changed:
            self._queues.setdefault(job.client, deque()).append(job)
            self._waiting += 1

    def withdraw(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove the waiting jobs that are wanted, and return them."""
        found: list[Job] = []
        with self._changed:
            for client, queue in list(self._queues.items()):
                found += [job for job in queue if wanted(job)]
                rest = deque(job for job in queue if not wanted(job))
                if rest:
                    self._queues[client] = rest
                else:
                    del self._queues[client]
            self._waiting -= len(found)
        return found

    def stop(self) -> None:
        """End the thread after the call that it computes."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def proceed(self) -> None:
        """Let what waits be computed: here, if it is one job and known to be brief."""
        if not self._waiting:
            return
        with self._changed:
            alone = self._waiting == 1 and not self._computing
            if not alone or not self._is_brief(next(iter(self._queues.values()))[0]):
                self._changed.notify()
                return
            jobs = self._take()
        jobs[0].brief = True
        self._finish(jobs)

    def _is_brief(self, job: Job) -> bool:
        return self._rows_of(job) <= self._brief.get(job.kind, -1)

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                self._computing = True
                jobs = self._take()
            self._finish(jobs)
            self._computing = False
            self._on_done()

    def _finish(self, jobs: list[Job]) -> None:
        """Compute jobs, and count how long that takes."""
        start = time.perf_counter()
        self._compute(jobs)
        seconds = time.perf_counter() - start
        self.busy_seconds += seconds
        self.batches += 1
        for job in jobs:
            job.seconds = seconds / len(jobs)
        self._learn(jobs[0].kind, sum(map(self._rows_of, jobs)), seconds)
        self.done.extend(jobs)

    def _learn(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Remember whether a call of so many rows is brief."""
        most = self._brief.pop(kind, -1)
        if seconds < _BRIEF:
            self._brief[kind] = max(most, rows)
        elif rows > most >= 0:
            self._brief[kind] = most
        if len(self._brief) > _KINDS:
            del self._brief[next(iter(self._brief))]

    def _take(self) -> list[Job]:
        """Take the first job of the client whose turn it is, and others of its kind.

        They come from all clients in turn, each client's in its order.
        """
        client = next(iter(self._queues))
        jobs, rows = [self._pop(client)], 0
        rows = self._rows_of(jobs[0])
        found = True
        while found:
            found = False
            for client in list(self._queues):
                job = self._queues[client][0]
                if job.kind == jobs[0].kind and rows + self._rows_of(job) <= self._rows:
                    jobs.append(self._pop(client))
                    rows += self._rows_of(job)
                    found = True
        return jobs

    def _pop(self, client: bytes) -> Job:
        """Take a client's first job, and let it be the last whose turn it is."""
        queue = self._queues.pop(client)
        job = queue.popleft()
        if queue:
            self._queues[client] = queue
        self._waiting -= 1
        return job

    def _rows_of(self, job: Job) -> int:
        return job.task.batch * (job.task.q_rows + job.task.k_rows)

    def _compute(self, jobs: list[Job]) -> None:
        """Compute jobs together; if that fails, each alone, so that one does not harm another."""
        try:
            tasks = [job.request for job in jobs if isinstance(job.request, Request)]
            steps = [job.request for job in jobs if isinstance(job.request, CacheStep)]
            results = [step.compute() for step in steps] or compute(tasks, self._device)
            for job, tensors in zip(jobs, results, strict=True):
                job.result = [bytes_of(x) for x in tensors]
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._compute([job])
                return
            jobs[0].error = f"the computation failed: {type(error).__name__}"
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        finally:
            for job in jobs:
                job.request = None
