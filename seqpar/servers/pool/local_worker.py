"""The trainer's own process: it computes what servers do not, and looks at what they did."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from seqpar.servers.pool.link import ServerLink
from seqpar.servers.pool.sampling import is_right
from seqpar.servers.pool.work import Attempt, PendingWork
from seqpar.servers.server.compute import compute
from seqpar.servers.server.hardware import hardware_of
from seqpar.servers.wire.request import Request

Outcome = list[Tensor] | Exception | None  # None: nobody waits for it any more
_SMOOTHING = 0.3  # of its rate, by the last task


class Home:
    """Computes tasks, one after another, in a thread of its own.

    Attributes:
        examined: attempts with their results, and whether these are right.
        tasks, work: results that were used, and their work.
        device: what it has computed on (`hardware_of`), or "".
    """

    def __init__(self, on_done: Callable[[], None], depth: int) -> None:
        """`depth` is how many tasks it has at once while servers are there."""
        self._done: deque[tuple[PendingWork, Outcome]] = deque()
        self.examined: deque[tuple[Attempt, list[Tensor], bool]] = deque()
        self.tasks = self.work = 0
        self.device = ""
        self._on_done, self._depth = on_done, depth
        self._owed: list[PendingWork] = []  # taken, and not done
        self._rate: float | None = None  # work it does in a second
        self._executor = ThreadPoolExecutor(1, "seqpar-home")

    def take(self, work: PendingWork) -> None:
        """Compute a task, unless it was taken before."""
        if not work.at_home:
            work.at_home = True
            self._owed.append(work)
            self._executor.submit(self._compute, work)

    def helps(self, work: PendingWork, links: Iterable[ServerLink]) -> bool:
        """Return whether a task is done sooner here than by a server, as far as is known.

        The first one is taken when all servers have others. On other hardware than theirs it would
        have other bits.
        """
        if len(self._owed) >= self._depth or work.at_home:
            return False
        ready = [link for link in links if link.state == "ready"]
        own = hardware_of(work.device)
        if any(link.device != own for link in ready):
            return False
        if self._rate is None:
            return all(len(link.attempts) > 1 for link in ready)
        rates = [link.rate for link in ready if link.rate]
        usual = sum(rates) / len(rates) if rates else 1.0
        waits = [(link.outstanding + work.cost) / (link.rate or usual) for link in ready]
        seconds = (sum(x.cost for x in self._owed) + work.cost) / self._rate
        return bool(rates) and seconds < min(waits)

    def finished(self) -> tuple[PendingWork, Outcome] | None:
        """Return the next task that is done, with its result or what computing raised."""
        if not self._done:
            return None
        work, outcome = self._done.popleft()
        self._owed.remove(work)
        return work, outcome

    def examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        """Compute so many rows of a server's result again."""
        self._executor.submit(self._examine, attempt, tensors, rows)

    def count(self, cost: int) -> None:
        """Count a result that was used."""
        self.tasks += 1
        self.work += cost

    def close(self) -> None:
        """End after the task that it computes."""
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
            rate = max(work.cost, 1) / max(1e-6, time.perf_counter() - start)
            last = rate if self._rate is None else self._rate
            self._rate = last + _SMOOTHING * (rate - last)
        self._done.append((work, outcome))
        self._on_done()

    def _examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        request = attempt.work.request
        assert request is not None
        try:
            right = is_right(request, tensors, rows, request.work + attempt.number)
        except Exception:  # there is no memory, say: the task itself is not computed at home
            right = True
        self.examined.append((attempt, tensors, right))
        self._on_done()


def _compute(request: Request) -> list[Tensor]:
    """Return a task's result, once it is there; what it reads may be on its way in any stream."""
    device = request.q.device
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    settle(device)
    result = compute([request], device)[0]
    settle(device)
    return result
