"""Room in a block of memory, lent and given back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGNMENT = 64  # bytes


def placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where parts of so many bytes begin, and how many bytes they take together."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


class Arena:
    """Lends ranges of a block of bytes, at multiples of 64, the first that is large enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # (start, stop), ascending, apart
        self._lent: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return where so many bytes begin that now are lent, or None if there are none."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                self._lent[start] = start + size
                return start
        return None

    def give(self, start: int) -> None:
        """Take back what was lent at this place."""
        stop = self._lent.pop(start)
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
        insort(self._free, (start, stop))

    @property
    def lent(self) -> int:
        """How many bytes are lent."""
        return sum(stop - start for start, stop in self._lent.items())
