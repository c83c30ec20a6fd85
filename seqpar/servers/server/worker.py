"""The threads of a server that read large payloads and compute jobs.

Clients take turns, and each call computes one job or several of one kind. A brief job that comes
alone is computed by the thread that received it, since waking another thread would take as long.
Long jobs have their own thread, so that other clients' short jobs do not wait for them.

On a CPU, each key that is served has its own threads. The system then divides the cores among the
keys, so that a key's job never waits for another key's job to end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from seqpar.servers.server.caches import CacheStep
from seqpar.servers.server.compute import compute
from seqpar.servers.transport.peers import Peer
from seqpar.servers.wire.payload import Bytes, bytes_of
from seqpar.servers.wire.protocol import StepRequest, Task
from seqpar.servers.wire.request import Request

_BRIEF = 0.001  # seconds of a call for which the thread that reads may be kept from that
_BRIEF_COST = (
    2**24
)  # multiply-adds, as `ComputeJob.cost` counts them; a call of more is never brief
_LONG_COST, _LONG_COST_ON_GPU = 2**31, 2**38  # from which on a call may hold up others
_SLICE_COST = 2**20  # of one slice, whatever it has
_ACTIVE = 1.0  # seconds after its last turn for which a key counts as one that is served
_KINDS = 256  # of which it is known what is brief
_MAX_THREADS = 8  # of one purpose, each for another key; more keys take turns
T = TypeVar("T")


@dataclass(eq=False)
class ComputeJob:
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
        checksum: of the result.
        cost: the multiply-adds of all pairs of rows that slices name, a bound of the work.
        withdrawn: why it is not to be computed, if that was said while its payload was read.
        brief: whether the thread that reads computed it itself.
        seconds: what computing took, shared among the requests of the call by their work.
    """

    client: Peer
    task: Task | StepRequest
    request: Request | CacheStep | None
    size: int
    kind: Hashable
    arrived: float = field(default_factory=time.monotonic)
    result: list[Bytes] | None = None
    error: str | None = None
    checksum: int = 0
    cost: int = 0
    withdrawn: str | None = None
    brief: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.count_cost()

    def count_cost(self) -> None:
        """Set `cost`, once there is a request."""
        if self.request is not None:
            self.cost = self._cost(self.request)

    def _cost(self, request: Request | CacheStep) -> int:
        task = self.task
        each = task.batch * task.heads * (task.dim + task.value_dim)
        if isinstance(request, CacheStep):
            return each * task.q_rows * request.length
        rows, keys = (x[:, 1] - x[:, 0] for x in (request.slices.q_rows, request.slices.k_rows))
        pairs = int((rows.astype(float) * keys).sum())
        passes = 1 if request.output is None else 2
        return each * pairs * passes + _SLICE_COST * len(request.slices) + self.size


class Turns:
    """Whose turn it is: a key that has had none, or else the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()  # when each key had its last turn

    def first(self, clients: Mapping[str, Peer]) -> Peer:
        """Return the client whose turn it is, of the first client of each key that waits."""
        keys = [key for key in clients if key not in self._last]
        keys += [key for key in self._last if key in clients]
        return clients[keys[0]]

    def take(
        self, clients: Mapping[str, Peer], served: Set[str] = frozenset()
    ) -> tuple[Peer, bool]:
        """Give the first client its turn; return it, and whether no other key is served now.

        `served` are the keys for which other threads work.
        """
        client, now = self.first(clients), time.monotonic()
        self._last[client.key] = now
        self._last.move_to_end(client.key)
        # A forgotten key returns as a new one, which would overtake keys that wait.
        if len(clients) == 1 and not served:
            for key, last in list(self._last.items()):
                if now - last > _ACTIVE:
                    del self._last[key]
        return client, len(clients) == len(self._last) == 1 and not served


class ThreadsByKey:
    """Threads of one purpose, of which each serves one key at a time and no two the same key.

    The owner's lock guards `served` and `start_for`.

    Attributes:
        served: the keys for which a thread works.
    """

    def __init__(self, first: threading.Thread, most: int, run: Callable[[], None]) -> None:
        """Use `first`, which the owner starts, and up to `most` − 1 more, which call `run`."""
        self.served: set[str] = set()
        self._first, self._most, self._run = first, most, run
        self._others: list[threading.Thread] = []

    def start_for(self, waiting: int) -> None:
        """Start more threads if this many keys that are not served wait, and too few are idle."""
        if self._first.ident is None:
            return
        missing = len(self.served) + waiting - (1 + len(self._others))
        for _ in range(min(missing, self._most - (1 + len(self._others)))):
            thread = threading.Thread(target=self._run, name=self._first.name, daemon=True)
            self._others.append(thread)
            thread.start()

    def others(self) -> list[threading.Thread]:
        """Return all threads but the first one."""
        return list(self._others)


def _join_all(threads: Iterable[threading.Thread], timeout: float | None) -> None:
    """Wait for all threads that were started to end, at most `timeout` seconds altogether."""
    end = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        if thread.ident is not None:
            threading.Thread.join(thread, None if end is None else max(0, end - time.monotonic()))


def _pop_first(queues: OrderedDict[Peer, deque[T]], client: Peer) -> T:
    """Take the first entry of a client's queue, and let the client be the last of all clients."""
    queue = queues.pop(client)
    first = queue.popleft()
    if queue:
        queues[client] = queue
    return first


class Worker(threading.Thread):
    """Computes jobs, at most so many rows in a call.

    Attributes:
        done: jobs that have a result or an error, in order.
        busy_seconds: how long it has computed.
        batches: how many calls that was.
    """

    def __init__(
        self,
        device: torch.device,
        rows: int,
        on_done: Callable[[], None],
        seal: Callable[[ComputeJob], None] = lambda job: None,
    ) -> None:
        """`seal` is called with each job that has a result, in the thread that computed it."""
        super().__init__(name="seqpar-compute", daemon=True)
        self.done: deque[ComputeJob] = deque()
        self.busy_seconds, self.batches = 0.0, 0
        self._device, self._rows, self._on_done = device, rows, on_done
        self._changed = threading.Condition()
        self._queues: OrderedDict[Peer, deque[ComputeJob]] = OrderedDict()
        self._turns = Turns(), Turns()  # of jobs that are not long, and of those that are
        self._waiting, self._stopped = 0, False
        self._seal = seal
        self._long = _LONG_COST if device.type == "cpu" else _LONG_COST_ON_GPU
        self._stepping: set[Peer] = set()  # clients of whose caches a step is computed
        serve_long = partial(self._serve, True)
        self._first_long = threading.Thread(
            target=serve_long, name="seqpar-compute-long", daemon=True
        )
        most = _MAX_THREADS if device.type == "cpu" else 1
        self._threads = (  # of jobs that are not long, and of those that are
            ThreadsByKey(self, most, partial(self._serve, False)),
            ThreadsByKey(self._first_long, most, serve_long),
        )
        self._brief: dict[Hashable, int] = {}  # the most rows that a brief call had, by kind

    @property
    def waiting(self) -> int:
        """How many jobs nobody has begun."""
        return self._waiting

    def add(self, job: ComputeJob) -> None:
        """Let a job wait for its turn, which it gets from the next `proceed` on."""
        with self._changed:
            self._queues.setdefault(job.client, deque()).append(job)
            self._waiting += 1

    def withdraw(self, wanted: Callable[[ComputeJob], bool]) -> list[ComputeJob]:
        """Remove the waiting jobs that are wanted, and return them."""
        found: list[ComputeJob] = []
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
            self._changed.notify_all()

    def start(self) -> None:
        """Start a thread for short jobs and one for long jobs; others start when keys need them."""
        super().start()
        self._first_long.start()

    def is_alive(self) -> bool:
        """Return whether all threads run."""
        return super().is_alive() and all(thread.is_alive() for thread in self._others())

    def join(self, timeout: float | None = None) -> None:
        """Wait for all threads."""
        _join_all([self, *self._others()], timeout)

    def _others(self) -> list[threading.Thread]:
        short, long = self._threads
        return [self._first_long, *short.others(), *long.others()]

    def proceed(self) -> None:
        """Let what waits be computed: here, if it is one job and known to be brief."""
        if not self._waiting:
            return
        with self._changed:
            alone = self._waiting == 1 and not self._threads[False].served
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

    def run(self) -> None:
        self._serve(False)

    def _serve(self, long: bool) -> None:
        """Compute jobs that may take long, or all others, until the worker is stopped."""
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
        """Compute jobs, and count how long that takes."""
        start = time.perf_counter()
        self._compute(jobs)
        seconds = time.perf_counter() - start
        for job in jobs:
            job.seconds = seconds / len(jobs)
            if job.result is not None:
                self._seal(job)
        with self._changed:
            self.busy_seconds += seconds
            self.batches += 1
            self._stepping -= {job.client for job in jobs if isinstance(job.task, StepRequest)}
            self._learn(jobs[0].kind, sum(map(self._rows_of, jobs)), seconds)
            self._changed.notify_all()
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

    def _first(self, long: bool) -> Peer | None:
        """Return the client whose turn it is: its first job is long, or not, and may be begun."""
        clients = self._firsts(long)
        return self._turns[long].first(clients) if clients else None

    def _firsts(self, long: bool) -> dict[str, Peer]:
        """Return the first client with such a job of each key, except of keys that are served."""
        clients: dict[str, Peer] = {}
        served = self._threads[long].served
        for client, queue in self._queues.items():
            key = client.key
            if key not in clients and key not in served and self._may_begin(queue[0], long):
                clients[key] = client
        return clients

    def _may_begin(self, job: ComputeJob, long: bool) -> bool:
        """Return whether a job is one of these, and no step: each needs the one before it."""
        ordered = isinstance(job.task, StepRequest) and job.client in self._stepping
        return (job.cost > self._long) == long and not ordered

    def _take(self, long: bool) -> list[ComputeJob]:
        """Take the first job of the client whose turn it is, and others of its kind.

        Keys have turns, and the clients of a key have turns among them. A single key's jobs come
        from all clients in turn, each client's in its order. While several keys are served, each
        turn is one job, so a key waits for at most one job of each other key.
        """
        served = self._threads[long].served
        first, alone = self._turns[long].take(self._firsts(long), served)
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
        self._waiting -= 1
        return _pop_first(self._queues, client)

    def _rows_of(self, job: ComputeJob) -> int:
        return job.task.batch * (job.task.q_rows + job.task.k_rows)

    def _compute(self, jobs: list[ComputeJob]) -> None:
        """Compute tasks together; if that fails, each alone, so that one does not harm another.

        Each step is computed alone and once, since a cache refuses a step that was followed by one.
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


class Reader(threading.Thread):
    """Reads payloads that are not small: checks them, and makes requests of them.

    Each key that is served has its own thread, as in `Worker`.

    Attributes:
        done: what was read, in order: the job, and what its payload is, or why it is none.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        super().__init__(name="seqpar-read", daemon=True)
        self.done: deque[tuple[ComputeJob, object]] = deque()
        self._on_done, self._changed = on_done, threading.Condition()
        self._queues: OrderedDict[Peer, deque[tuple[ComputeJob, Callable[[], object]]]] = (
            OrderedDict()
        )
        self._turns = Turns()
        self._stopped = self._trims = False
        self._threads = ThreadsByKey(self, _MAX_THREADS, self.run)

    def add(self, job: ComputeJob, read: Callable[[], object]) -> None:
        """Have a job's payload read, in its client's order, when it is its key's turn."""
        with self._changed:
            self._queues.setdefault(job.client, deque()).append((job, read))
            self._threads.start_for(len(self._firsts()))
            self._changed.notify()

    def drop(self, client: Peer) -> None:
        """Read nothing more for a client, and give the memory that was its to the system."""
        with self._changed:
            self._queues.pop(client, None)
            self._trims = True
            self._changed.notify()

    def is_alive(self) -> bool:
        """Return whether all threads run."""
        return super().is_alive() and all(x.is_alive() for x in self._threads.others())

    def join(self, timeout: float | None = None) -> None:
        """Wait for all threads."""
        _join_all([self, *self._threads.others()], timeout)

    def stop(self) -> None:
        """End each thread after the payload that it reads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _firsts(self) -> dict[str, Peer]:
        """Return the first client of each key, except of keys that are served."""
        clients: dict[str, Peer] = {}
        for client in self._queues:
            if client.key not in self._threads.served:
                clients.setdefault(client.key, client)
        return clients

    def _take(self) -> tuple[ComputeJob, Callable[[], object]]:
        """Take the first payload of the key whose turn it is, of its clients in turn."""
        client, _ = self._turns.take(self._firsts(), self._threads.served)
        return _pop_first(self._queues, client)

    def run(self) -> None:
        while True:
            with self._changed:
                while not (self._firsts() or self._stopped or self._trims):
                    self._changed.wait()
                if self._stopped:
                    return
                trims, self._trims = self._trims, False
                job, read = self._take() if self._firsts() else (None, None)
                key = "" if job is None else job.client.key
                if job is not None:
                    self._threads.served.add(key)
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
                self._threads.served.discard(key)
                self._changed.notify_all()
            self._on_done()


_LIBC = ctypes.CDLL(None)


def trim() -> None:
    """Give memory that is free back to the system, where the C library can do so."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
