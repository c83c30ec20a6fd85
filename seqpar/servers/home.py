"""The trainer's own process: it computes what no server does, and looks at what servers did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from seqpar.servers.compute import compute
from seqpar.servers.sampling import is_right
from seqpar.servers.work import Attempt, Work

Outcome = list[Tensor] | Exception


class Home:
    """Computes tasks, one after another, in a thread of its own.

    Attributes:
        done: tasks with their results, or what computing raised.
        examined: attempts with their results, and whether these are right.
        tasks, work: results that were used, and their work.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self.done: deque[tuple[Work, Outcome]] = deque()
        self.examined: deque[tuple[Attempt, list[Tensor], bool]] = deque()
        self.tasks = self.work = 0
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(1, "seqpar-home")

    def take(self, work: Work) -> None:
        """Compute a task, unless it was taken before."""
        if not work.at_home:
            work.at_home = True
            self._executor.submit(self._compute, work)

    def examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        """Compute so many rows of a server's result again."""
        self._executor.submit(self._examine, attempt, tensors, rows)

    def count(self, work: Work) -> None:
        """Count a result that was used."""
        self.tasks += 1
        self.work += work.cost

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

    def _examine(self, attempt: Attempt, tensors: list[Tensor], rows: int) -> None:
        request = attempt.work.request
        try:
            right = is_right(request, tensors, rows, request.work + attempt.number)
        except Exception:  # there is no memory, say: the task itself is not computed at home
            right = True
        self.examined.append((attempt, tensors, right))
        self._on_done()
