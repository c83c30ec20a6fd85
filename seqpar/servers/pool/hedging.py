"""When a task has taken so long at one server that another should be asked."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_KEPT = 256  # durations
_NEEDED = 20
_LEAST = 0.02  # seconds


class Hedging:
    """Says which tasks are stragglers: slower, for their work, than this share of those before.

    A task's duration is compared with others' after division by its work plus a constant: what a
    task of no work at all takes in the median is not known, so the median work stands for it.
    """

    def __init__(self, quantile: float, factor: float = 1.5) -> None:
        self._quantile, self._factor = quantile, factor
        self._order: deque[tuple[int, float]] = deque()
        self._pace: list[float] = []
        self._work: list[int] = []

    def count(self, work: int, seconds: float) -> None:
        """Count what a task has taken."""
        if self._work and len(self._order) >= _KEPT:
            old_work, old_pace = self._order.popleft()
            del self._work[bisect_left(self._work, old_work)]
            del self._pace[bisect_left(self._pace, old_pace)]
        insort(self._work, work)
        pace = seconds / (work + self._constant())
        insort(self._pace, pace)
        self._order.append((work, pace))

    def is_late(self, work: int, seconds: float) -> bool:
        """Return whether a task that has taken so long is a straggler."""
        if len(self._pace) < _NEEDED or seconds < _LEAST:
            return False
        usual = self._pace[int(self._quantile * (len(self._pace) - 1))]
        return seconds > self._factor * usual * (work + self._constant())

    def _constant(self) -> int:
        return 1 + self._work[len(self._work) // 2]
