"""The threads of a server that read large payloads and compute jobs.

Clients take turns, and each call computes one job or several jobs of one kind. If the only waiting
job is brief, the thread that received it computes it, since waking another thread would take as
long. Long jobs have their own thread, so that other clients' short jobs do not wait for them.

On a CPU, each key that is served has its own threads. The system then divides the cores among the
keys, so that a key's job never waits for another key's job to end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from seqpar.servers.server.caches import CacheStep
from seqpar.servers.server.compute import compute
from seqpar.servers.transport.peers import Peer
from seqpar.servers.wire.payload import Bytes, bytes_of, checksum
from seqpar.servers.wire.protocol import StepRequest, Task
from seqpar.servers.wire.request import Request

# Costs are multiply-adds, as `ComputeJob.cost` counts them.
_BRIEF = 0.001  # seconds; a shorter call may run in the thread that receives messages
_BRIEF_COST = 2**24  # a call that costs more is never brief
_LONG_COST, _LONG_COST_ON_GPU = 2**31, 2**38  # a job that costs more could delay others
_SLICE_COST = 2**20  # added per slice, whatever its size
_ACTIVE = 1.0  # seconds after its last turn for which a key counts as active
_KINDS = 256  # kinds for which the largest brief call is remembered
_MAX_THREADS = 8  # per purpose, each for another key; if there are more keys, they take turns
T = TypeVar("T")


@dataclass(eq=False)
class ComputeJob:
    """A request that a server has accepted."""

    client: Peer
    task: Task | StepRequest
    request: Request | CacheStep | None  # None after the computation, or before it is read
    size: int  # bytes of the request and its result
    kind: Hashable  # equal for requests that one call may compute
    arrived: float = field(default_factory=time.monotonic)
    result: list[Bytes] | None = None
    error: str | None = None  # why the computation failed
    checksum: int = 0  # of the result
    cost: int = 0  # multiply-adds of all pairs of rows in the slices, an upper bound of the work
    withdrawn: str | None = None  # why the job was withdrawn while its payload was read
    brief: bool = False  # whether the thread that received the job computed it
    seconds: float = 0.0  # the call's time divided by its number of jobs

    def __post_init__(self) -> None:
        self.count_cost()

    def count_cost(self) -> None:
        """Set `cost` if there is a request."""
        request, task = self.request, self.task
        each = task.batch * task.heads * (task.dim + task.value_dim)
        if isinstance(request, CacheStep):
            self.cost = each * task.q_rows * request.length
        elif request is not None:
            slices, passes = request.slices, 1 if request.output is None else 2
            rows, keys = (x[:, 1] - x[:, 0] for x in (slices.q_rows, slices.k_rows))
            pairs = int((rows.astype(float) * keys).sum())
            self.cost = each * pairs * passes + _SLICE_COST * len(slices) + self.size


class ThreadsByKey:
    """Threads of one purpose. Each serves one key at a time, and no two serve the same key.

    The next key is one that has not had a turn, or the one that waits longest. The owner's lock
    guards all calls but the first `start`.
    """

    def __init__(self, name: str, most: int, run: Callable[[], None]) -> None:
        """Up to `most` threads of this name call `run`."""
        self.served: set[str] = set()  # the keys for which a thread works
        self.threads: list[threading.Thread] = []
        self._name, self._most, self._run = name, most, run
        self._last: OrderedDict[str, float] = OrderedDict()  # when each key had its last turn

    def start(self) -> None:
        """Start one more thread."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def start_for(self, waiting: int) -> None:
        """Start threads if too few are idle for the `waiting` keys that no thread serves."""
        if self.threads:  # the owner has started the first one
            missing = len(self.served) + waiting - len(self.threads)
            for _ in range(min(missing, self._most - len(self.threads))):
                self.start()

    def waiting(self, clients: Iterable[Peer]) -> dict[str, Peer]:
        """Return the first of these clients for each key that no thread serves."""
        firsts: dict[str, Peer] = {}
        for client in clients:
            if client.key not in self.served:
                firsts.setdefault(client.key, client)
        return firsts

    def first(self, waiting: Mapping[str, Peer]) -> Peer:
        """Return the next client."""
        keys = [key for key in waiting if key not in self._last]
        keys += [key for key in self._last if key in waiting]
        return waiting[keys[0]]

    def take(self, waiting: Mapping[str, Peer]) -> tuple[Peer, bool]:
        """Give the next client its turn; return it, and whether only its key is active."""
        client, now = self.first(waiting), time.monotonic()
        self._last[client.key] = now
        self._last.move_to_end(client.key)
        # A key that is forgotten and returns counts as new, and would overtake keys that wait.
        if len(waiting) == 1 and not self.served:
            for key, last in list(self._last.items()):
                if now - last > _ACTIVE:
                    del self._last[key]
        return client, len(waiting) == len(self._last) == 1 and not self.served


class ThreadGroup:
    """Threads of one or more purposes that start and end together."""

    def __init__(self, on_done: Callable[[], None], *threads: ThreadsByKey) -> None:
        self._on_done, self._threads = on_done, threads
        self._changed = threading.Condition()
        self._stopped = False

    def start(self) -> None:
        """Start a thread for each purpose; others start when keys need them."""
        for each in self._threads:
            each.start()

    def is_alive(self) -> bool:
        """Return whether all threads run."""
        return all(thread.is_alive() for each in self._threads for thread in each.threads)

    def stop(self) -> None:
        """End each thread after what it does now."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until all threads have ended, at most `timeout` seconds in total."""
        end = time.monotonic() + timeout
        for each in self._threads:
            for thread in each.threads:
                thread.join(max(0, end - time.monotonic()))


def _pop_first(queues: OrderedDict[Peer, deque[T]], client: Peer) -> T:
    """Take the first entry of a client's queue, and move the client to the end of `queues`."""
    queue = queues.pop(client)
    first = queue.popleft()
    if queue:
        queues[client] = queue
    return first


class Worker(ThreadGroup):
    """Computes jobs, at most `rows` rows in a call of several jobs."""

    def __init__(self, device: torch.device, rows: int, on_done: Callable[[], None]) -> None:
        most = _MAX_THREADS if device.type == "cpu" else 1
        short = ThreadsByKey("seqpar-compute", most, partial(self._serve, False))
        long = ThreadsByKey("seqpar-compute-long", most, partial(self._serve, True))
        super().__init__(on_done, short, long)
        self.done: deque[ComputeJob] = deque()  # that have a result or an error, in order
        self.busy_seconds = 0.0  # spent in computation
        self.batches = 0  # computing calls
        self._device, self._rows = device, rows
        self._queues: OrderedDict[Peer, deque[ComputeJob]] = OrderedDict()
        self.waiting = 0  # jobs that have not begun
        self._long = _LONG_COST if device.type == "cpu" else _LONG_COST_ON_GPU
        self._stepping: set[Peer] = set()  # clients that have a step in computation
        self._brief: dict[Hashable, int] = {}  # most rows of a brief call, by kind

    def add(self, job: ComputeJob) -> None:
        """Queue a job; the next `proceed` gets it computed when it is its turn."""
        with self._changed:
            self._queues.setdefault(job.client, deque()).append(job)
            self.waiting += 1

    def withdraw(self, wanted: Callable[[ComputeJob], bool]) -> list[ComputeJob]:
        """Remove and return the waiting jobs for which `wanted` is true."""
        found: list[ComputeJob] = []
        with self._changed:
            for client, queue in list(self._queues.items()):
                found += [job for job in queue if wanted(job)]
                rest = deque(job for job in queue if not wanted(job))
                if rest:
                    self._queues[client] = rest
                else:
                    del self._queues[client]
            self.waiting -= len(found)
        return found

    def proceed(self) -> None:
        """Compute waiting jobs: a single job that is known to be brief here, others in threads."""
        if not self.waiting:
            return
        with self._changed:
            alone = self.waiting == 1 and not self._threads[False].served
            first = self._first(False)
            if not alone or first is None or not self._is_brief(self._queues[first][0]):
                for long in (False, True):
                    self._threads[long].start_for(len(self._firsts(long)))
                self._changed.notify_all()
                return
            jobs = self._take(False)
        jobs[0].brief = True
        self._finish(jobs)

    def _is_brief(self, job: ComputeJob) -> bool:
        rows = self._brief.get(job.kind, -1)
        return self._rows_of(job) <= rows and job.cost <= _BRIEF_COST

    def _serve(self, long: bool) -> None:
        """Compute long jobs, or short ones, until the worker is stopped."""
        while True:
            with self._changed:
                while self._first(long) is None and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                jobs = self._take(long)
                key = jobs[0].client.key
                self._threads[long].served.add(key)
            self._finish(jobs)
            with self._changed:
                self._threads[long].served.discard(key)
            self._on_done()

    def _finish(self, jobs: list[ComputeJob]) -> None:
        """Compute jobs in one call, and record its time."""
        start = time.perf_counter()
        self._compute(jobs)
        seconds = time.perf_counter() - start
        for job in jobs:
            job.seconds = seconds / len(jobs)
            if job.result is not None:
                job.checksum = checksum(job.result)
        with self._changed:
            self.busy_seconds += seconds
            self.batches += 1
            self._stepping -= {job.client for job in jobs if isinstance(job.task, StepRequest)}
            self._learn(jobs[0].kind, sum(map(self._rows_of, jobs)), seconds)
            self._changed.notify_all()
        self.done.extend(jobs)

    def _learn(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Remember a kind's largest brief call; a slow call that is no larger forgets it."""
        most = self._brief.pop(kind, -1)
        if seconds < _BRIEF:
            self._brief[kind] = max(most, rows)
        elif rows > most >= 0:
            self._brief[kind] = most
        if len(self._brief) > _KINDS:
            del self._brief[next(iter(self._brief))]

    def _first(self, long: bool) -> Peer | None:
        """Return the next client among those whose first job is long, or short, and may begin."""
        clients = self._firsts(long)
        return self._threads[long].first(clients) if clients else None

    def _firsts(self, long: bool) -> dict[str, Peer]:
        """Return the first client with such a job for each key that no thread serves."""
        able = [x for x, queue in self._queues.items() if self._may_begin(queue[0], long)]
        return self._threads[long].waiting(able)

    def _may_begin(self, job: ComputeJob, long: bool) -> bool:
        """Return whether a job is long, or short, and no earlier step of its client is running."""
        ordered = isinstance(job.task, StepRequest) and job.client in self._stepping
        return (job.cost > self._long) == long and not ordered

    def _take(self, long: bool) -> list[ComputeJob]:
        """Take the next client's first job and, if only its key is active, more jobs of its kind.

        Keys take turns, and the clients of each key take turns among themselves. While only one key
        is active, further jobs are taken from all of its clients in rotation, each client's jobs in
        order. While several keys are active, each turn is one job, so a key waits for at most one
        job of each other key.
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
        self._stepping |= {job.client for job in jobs if isinstance(job.task, StepRequest)}
        return jobs

    def _pop(self, client: Peer) -> ComputeJob:
        self.waiting -= 1
        return _pop_first(self._queues, client)

    def _rows_of(self, job: ComputeJob) -> int:
        return job.task.batch * (job.task.q_rows + job.task.k_rows)

    def _compute(self, jobs: list[ComputeJob]) -> None:
        """Compute tasks together; if that fails, compute each separately to isolate the failure.

        Each step is computed separately and once: a cache refuses a step after a later one.
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
            jobs[0].error = f"the computation failed: {type(error).__name__}"
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        finally:
            for job in jobs:
                job.request = None


class Reader(ThreadGroup):
    """Checks large payloads, and turns them into requests."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._readers = ThreadsByKey("seqpar-read", _MAX_THREADS, self._serve)
        super().__init__(on_done, self._readers)
        # Jobs in order, each with the result of `read`, its exception, or None if withdrawn.
        self.done: deque[tuple[ComputeJob, object]] = deque()
        self._queues: OrderedDict[Peer, deque[tuple[ComputeJob, Callable[[], object]]]] = (
            OrderedDict()
        )
        self._trims = False

    def add(self, job: ComputeJob, read: Callable[[], object]) -> None:
        """Queue a job's payload, in its client's order; `read` is called on its key's turn."""
        with self._changed:
            self._queues.setdefault(job.client, deque()).append((job, read))
            self._readers.start_for(len(self._readers.waiting(self._queues)))
            self._changed.notify()

    def drop(self, client: Peer) -> None:
        """Drop a client's queued payloads, and return their memory to the system."""
        with self._changed:
            self._queues.pop(client, None)
            self._trims = True
            self._changed.notify()

    def _take(self) -> tuple[ComputeJob, Callable[[], object]]:
        """Take the next key's first payload; the clients of the key also take turns."""
        client, _ = self._readers.take(self._readers.waiting(self._queues))
        return _pop_first(self._queues, client)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._readers.waiting(self._queues) or self._stopped or self._trims):
                    self._changed.wait()
                if self._stopped:
                    return
                trims, self._trims = self._trims, False
                has_job = self._readers.waiting(self._queues)
                job, read = self._take() if has_job else (None, None)
                key = "" if job is None else job.client.key
                if job is not None:
                    self._readers.served.add(key)
            if trims:
                trim()
            if job is None or read is None:
                continue
            result: object
            try:
                result = read() if job.withdrawn is None else None
            except Exception as error:
                result = error
            self.done.append((job, result))
            del job, read, result
            with self._changed:
                self._readers.served.discard(key)
                self._changed.notify_all()
            self._on_done()


_LIBC = ctypes.CDLL(None)


def trim() -> None:
    """Return free memory to the system, if the C library can do so."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
