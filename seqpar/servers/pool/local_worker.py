"""A thread of the trainer, which computes tasks that no server computes, and checks results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from seqpar.servers.pool.connection import Attempt, PendingWork, ServerConnection, smoothed_rate
from seqpar.servers.pool.sampling import is_right
from seqpar.servers.server.compute import compute, hardware_of
from seqpar.servers.wire.request import Request

Outcome = list[Tensor] | Exception | None  # None if the task was settled before it was computed


class ExitingError(Exception):
    """Python is about to exit, and starts no more threads."""


class LocalWorker:
    def __init__(self, on_done: Callable[[], None], depth: int) -> None:
        """The worker calls `on_done` whenever it has computed a task or checked a result.

        While servers are ready, the worker has at most `depth` tasks at a time.
        """
        self._done: deque[tuple[PendingWork, Outcome]] = deque()
        # Each entry is an attempt, its result, and whether the result is right.
        self.examined: deque[tuple[Attempt, list[Tensor], bool]] = deque()
        self.tasks = 0  # the number of results that were used
        self.work = 0  # the work in the results that were used
        self.device = ""  # the hardware of the last task, as `hardware_of` describes it
        self._on_done, self._depth = on_done, depth
        self._unfinished: list[PendingWork] = []
        self._rate: float | None = None  # work per second
        self._executor = ThreadPoolExecutor(1, "seqpar-home")

    def take(self, work: PendingWork) -> None:
        if not work.at_home:
            work.at_home = True
            self._unfinished.append(work)
            self._submit(self._compute, work)

    def helps(self, work: PendingWork, servers: Iterable[ServerConnection]) -> bool:
        """Return whether this process is expected to finish a task before any ready server."""
        if len(self._unfinished) >= self._depth or work.at_home:
            return False
        ready = [server for server in servers if server.state == "ready"]
        own = hardware_of(work.device)
        if any(server.device != own for server in ready):
            return False  # different hardware could compute different bits
        # The worker has no rate yet; it takes its first task if all servers are busy.
        if self._rate is None:
            return all(len(server.attempts) > 1 for server in ready)
        rates = [server.rate for server in ready if server.rate]
        usual = sum(rates) / len(rates) if rates else 1.0
        waits = [(server.outstanding + work.cost) / (server.rate or usual) for server in ready]
        seconds = (sum(x.cost for x in self._unfinished) + work.cost) / self._rate
        return bool(rates) and seconds < min(waits)

    def finished(self) -> tuple[PendingWork, Outcome] | None:
        if not self._done:
            return None
        work, outcome = self._done.popleft()
        self._unfinished.remove(work)
        return work, outcome

    def examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        """Queue a check of `rows` rows of a server's result. The worker appends the outcome of the
        check to `examined`.
        """
        with suppress(ExitingError):
            self._submit(self._examine, attempt, tensors, rows)

    def _submit(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._executor.submit(call, *arguments)
        except RuntimeError:
            raise ExitingError("the interpreter exits") from None

    def count(self, cost: int) -> None:
        self.tasks += 1
        self.work += cost

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _compute(self, work: PendingWork) -> None:
        outcome: Outcome = None
        if not work.settled:
            start, self.device = time.perf_counter(), hardware_of(work.device)
            assert work.request is not None
            try:
                outcome = _compute(work.request)
            except Exception as error:
                outcome = error
            self._rate = smoothed_rate(self._rate, work.cost, time.perf_counter() - start)
        self._done.append((work, outcome))
        self._on_done()

    def _examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        request = attempt.work.request
        assert request is not None
        try:
            right = is_right(request, tensors, rows, request.work + attempt.number)
        except Exception:  # for example out of memory; the result then counts as right
            right = True
        self.examined.append((attempt, tensors, right))
        self._on_done()


def _compute(request: Request) -> list[Tensor]:
    device = request.q.device
    # This thread has its own CUDA stream. Other streams can still be writing the inputs, and must
    # not read the result too early. The computation therefore waits for an idle GPU before and
    # after it.
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    settle(device)
    result = compute([request], device)[0]
    settle(device)
    return result
