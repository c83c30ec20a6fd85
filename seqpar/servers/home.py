"""The trainer's own process as the last resort: it computes what no server does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from seqpar.servers.compute import compute
from seqpar.servers.work import Work

Outcome = list[Tensor] | Exception


class Home:
    """Computes tasks, one after another, in a thread of its own.

    Attributes:
        done: tasks with their results, or what computing raised.
        tasks, work: results that were used, and their work.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self.done: deque[tuple[Work, Outcome]] = deque()
        self.tasks = self.work = 0
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, "seqpar-home")

    def take(self, work: Work) -> None:
        """Compute a task, unless it was taken before."""
        if not work.at_home:
            work.at_home = True
            self._executor.submit(self._compute, work)

    def count(self, work: Work) -> None:
        """Count a result that was used."""
        self.tasks += 1
        self.work += work.request.work

    def close(self) -> None:
        """End after the task that it computes."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _compute(self, work: Work) -> None:
        if work.settled:
            return
        outcome: Outcome
        try:
            outcome = compute([work.request], work.request.q.device)[0]
        except Exception as error:
            outcome = error
        self.done.append((work, outcome))
        self._on_done()
