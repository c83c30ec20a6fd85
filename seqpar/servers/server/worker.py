"""The threads of a server that compute jobs.

* A *job* is a request that the server has accepted. A *computing call* computes one job, or several
  jobs of one kind.
* A job is *long* if its cost is above a limit, and *short* otherwise. Long jobs and short jobs have
  separate threads, so that a short job does not wait for a long job of another client.
* A *name* is the name in a client's certificate, and stands for all clients with this name. The
  threads serve names in *turns*. A turn is one computing call. A name is *active* while its clients
  have jobs, and for 1 s after its last turn.

On a CPU, up to eight names are served at the same time, each by a thread for short jobs and a
thread for long jobs. The operating system divides the cores among the threads. On a GPU, there is
only one thread for short jobs and one for long jobs.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from seqpar.servers.server.account import Client
from seqpar.servers.server.caches import CacheLost, CacheStep
from seqpar.servers.server.compute import compute
from seqpar.servers.wire.messages import Task
from seqpar.servers.wire.payload import Bytes, bytes_of, checksum
from seqpar.servers.wire.request import Request

# Costs are numbers of multiply-adds, as in `ComputeJob.cost`.
_LONG_COST, _LONG_COST_ON_GPU = 2**31, 2**38  # a job that costs more is long
_SLICE_COST = 2**20  # added for each slice, whatever its size
_ACTIVE = 1.0  # how many seconds after its last turn a name counts as active
_MAX_THREADS = 8  # on a CPU, the most threads for short jobs, and the most for long jobs


class ComputationError(Exception):
    """A computation failed. The text contains no data of a payload."""


@dataclass(eq=False)
class ComputeJob:
    client: Client
    task: Task
    request: Request | CacheStep | None  # None after the computation
    size: int  # the bytes of the request and its result
    kind: Hashable  # equal for requests that one computing call can compute
    on_done: Callable[[], object]  # called in a computing thread when there is a result or an error
    done: asyncio.Event  # set by `on_done`
    result: list[Bytes] | None = None
    error: Exception | None = None  # why the computation failed
    checksum: int = 0  # the checksum of the result
    cost: int = 0  # multiply-adds of all pairs of rows in the slices, an upper bound of the work
    seconds: float = 0.0  # the time of the computing call, divided by its number of jobs

    def __post_init__(self) -> None:
        request, task = self.request, self.task
        each = task.batch * task.heads * (task.dim + task.value_dim)
        if isinstance(request, CacheStep):
            self.cost = each * task.q_rows * request.length
        elif request is not None:
            slices, passes = request.slices, 1 if request.output is None else 2
            rows, keys = (x[:, 1] - x[:, 0] for x in (slices.q_rows, slices.k_rows))
            pairs = int((rows.astype(float) * keys).sum())
            self.cost = each * pairs * passes + _SLICE_COST * len(slices) + self.size


class ThreadsByName:
    """The threads that compute long jobs, or the threads that compute short jobs. A job is a
    request.

    A name stands for all clients whose certificates have this name. A thread computes jobs of one
    name at a time, and no two threads compute jobs of the same name. A thread that becomes free
    continues with the name that has waited longest. The caller must hold `lock`, except for the
    first `start`.
    """

    def __init__(self, name: str, most: int, run: Callable[[], None], lock: threading.Lock) -> None:
        """At most `most` threads run the function `run`. `name` is the name of each thread."""
        self.changed = threading.Condition(lock)  # notified when a job can begin
        self.served: set[str] = set()  # the names that a thread serves now
        self.threads: list[threading.Thread] = []
        self._name, self._most, self._run = name, most, run
        self._last: OrderedDict[str, float] = OrderedDict()  # when each name had its last turn

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        # Only after the start, because a thread that has not started counts as dead.
        self.threads.append(thread)

    def start_for(self, waiting: int) -> None:
        """Start threads for `waiting` names for which no thread computes.

        There are never more than `most` threads.
        """
        if self.threads:  # `Worker.start` must have started the first thread
            missing = len(self.served) + waiting - len(self.threads)
            for _ in range(min(missing, self._most - len(self.threads))):
                self.start()

    def waiting(self, clients: Iterable[Client]) -> dict[str, Client]:
        """Return the first client among `clients` with each name for which no thread computes."""
        firsts: dict[str, Client] = {}
        for client in clients:
            if client.name not in self.served:
                firsts.setdefault(client.name, client)
        return firsts

    def first(self, waiting: Mapping[str, Client]) -> Client:
        names = [name for name in waiting if name not in self._last]
        names += [name for name in self._last if name in waiting]
        return waiting[names[0]]

    def take(self, waiting: Mapping[str, Client]) -> tuple[Client, bool]:
        """Choose the client whose jobs are computed next.

        Returns the client, and whether only one name has jobs, or has had jobs in the last second.
        """
        client, now = self.first(waiting), time.monotonic()
        self._last[client.name] = now
        self._last.move_to_end(client.name)
        # A forgotten name counts as new when it has jobs again, and new names come first. To keep
        # it from overtaking names that wait, names are forgotten only while no other name waits or
        # is served.
        if len(waiting) == 1 and not self.served:
            for name, last in list(self._last.items()):
                if now - last > _ACTIVE:
                    del self._last[name]
        return client, len(waiting) == len(self._last) == 1 and not self.served


class Worker:
    """Computes jobs in threads. If several jobs are computed together, they have at most `rows`
    query and key rows.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        most = _MAX_THREADS if device.type == "cpu" else 1
        self._lock = threading.Lock()
        short = ThreadsByName("seqpar-compute", most, partial(self._serve, False), self._lock)
        long = ThreadsByName("seqpar-compute-long", most, partial(self._serve, True), self._lock)
        self.busy_seconds = 0.0  # the time of all computing calls
        self.batches = 0  # the number of computing calls
        self.waiting = 0  # the number of jobs that have not begun
        self._threads = short, long
        self._device, self._rows = device, rows
        self._queues: OrderedDict[Client, deque[ComputeJob]] = OrderedDict()
        self._long = _LONG_COST if device.type == "cpu" else _LONG_COST_ON_GPU
        self._stepping: set[Client] = set()  # clients whose steps are being computed
        self._stopped = False

    def start(self) -> None:
        """Start one thread for short jobs and one thread for long jobs. Further threads start when
        names need them.
        """
        for each in self._threads:
            each.start()

    def is_alive(self) -> bool:
        return all(thread.is_alive() for each in self._threads for thread in each.threads)

    def stop(self, timeout: float) -> None:
        """End each thread when its current jobs are computed, and wait at most `timeout` seconds
        for this.
        """
        with self._lock:
            self._stopped = True
            for each in self._threads:
                each.changed.notify_all()
        end = time.monotonic() + timeout
        for each in self._threads:
            for thread in each.threads:
                thread.join(max(0, end - time.monotonic()))

    def add(self, job: ComputeJob) -> None:
        with self._lock:
            self._queues.setdefault(job.client, deque()).append(job)
            self.waiting += 1
            self._wake()

    def _wake(self) -> None:
        for long in (False, True):
            if able := self._firsts(long):
                self._threads[long].start_for(len(able))
                self._threads[long].changed.notify(len(able))

    def withdraw(self, job: ComputeJob) -> bool:
        """Remove a job from its queue. Return False if the job has begun or is done."""
        with self._lock:
            queue = self._queues.get(job.client, ())
            if job not in queue:
                return False
            assert isinstance(queue, deque)
            queue.remove(job)
            if not queue:
                del self._queues[job.client]
            self.waiting -= 1
            self._wake()
            return True

    def _serve(self, long: bool) -> None:
        """Compute the long jobs, or the short jobs, until the worker is stopped."""
        while True:
            with self._lock:
                while self._first(long) is None and not self._stopped:
                    self._threads[long].changed.wait()
                if self._stopped:
                    return
                jobs = self._take(long)
                name = jobs[0].client.name
                self._threads[long].served.add(name)
                self._wake()
            self._finish(jobs)
            for job in jobs:
                job.on_done()
            with self._lock:
                self._threads[long].served.discard(name)
                self._stepping -= {job.client for job in jobs if job.task.operation == "step"}
                self._wake()
                # Otherwise these variables of an idle thread would keep tensors in memory.
                del jobs, job

    def _finish(self, jobs: list[ComputeJob]) -> None:
        start = time.perf_counter()
        self._compute(jobs)
        seconds = time.perf_counter() - start
        for job in jobs:
            job.seconds = seconds / len(jobs)
            if job.result is not None:
                job.checksum = checksum(job.result)
        with self._lock:
            self.busy_seconds += seconds
            self.batches += 1

    def _first(self, long: bool) -> Client | None:
        clients = self._firsts(long)
        return self._threads[long].first(clients) if clients else None

    def _firsts(self, long: bool) -> dict[str, Client]:
        """Return, for each name for which no thread computes, the first client whose job can
        begin.
        """
        able = [x for x, queue in self._queues.items() if self._may_begin(queue[0], long)]
        return self._threads[long].waiting(able)

    def _may_begin(self, job: ComputeJob, long: bool) -> bool:
        """Return whether a job can begin now in a thread for long jobs or, if `long` is False, in a
        thread for short jobs.

        A decoding step waits while an earlier step of the same client is being computed.
        """
        ordered = job.task.operation == "step" and job.client in self._stepping
        return (job.cost > self._long) == long and not ordered

    def _take(self, long: bool) -> list[ComputeJob]:
        """Take the jobs that are computed together next from the queues.

        If clients with different names have jobs, or have had jobs in the last second, a single job
        is taken, so that no client waits long. If all of these clients have the same name, several
        jobs of one kind are taken. The jobs of one client are taken in the order in which the
        client has sent them.
        """
        first, alone = self._threads[long].take(self._firsts(long))
        jobs = [self._pop(first)]
        rows = self._rows_of(jobs[0])
        found = alone
        while found:
            found = False
            for client in list(self._queues):
                job = self._queues[client][0]
                fits = rows + self._rows_of(job) <= self._rows and self._may_begin(job, long)
                if job.kind == jobs[0].kind and fits:
                    jobs.append(self._pop(client))
                    rows += self._rows_of(job)
                    found = True
        self._stepping |= {job.client for job in jobs if job.task.operation == "step"}
        return jobs

    def _pop(self, client: Client) -> ComputeJob:
        self.waiting -= 1
        queue = self._queues.pop(client)
        first = queue.popleft()
        if queue:
            self._queues[client] = queue
        return first

    def _rows_of(self, job: ComputeJob) -> int:
        return job.task.batch * (job.task.q_rows + job.task.k_rows)

    def _compute(self, jobs: list[ComputeJob]) -> None:
        """Compute jobs in one call.

        If a call of several jobs fails, each job is computed again separately, so that only the
        jobs that caused the failure get an error. Decoding steps are always computed separately.
        """
        try:
            steps = [job.request for job in jobs if isinstance(job.request, CacheStep)]
            if steps and len(jobs) > 1:
                for job in jobs:
                    self._compute([job])
                return
            tasks = [job.request for job in jobs if isinstance(job.request, Request)]
            results = [step.compute() for step in steps] or compute(tasks, self._device)
            for job, tensors in zip(jobs, results, strict=True):
                job.result = bytes_of(tensors)
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._compute([job])
                return
            lost = isinstance(error, CacheLost)
            failed = ComputationError(f"the computation failed: {type(error).__name__}")
            jobs[0].error = error if lost else failed
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        finally:
            for job in jobs:
                job.request = None


_LIBC = ctypes.CDLL(None)


def trim() -> None:
    """Return free memory to the operating system, if the C library can do that."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
