"""An allocator for a block of memory. Each allocated range begins at a multiple of 64 bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGNMENT = 64  # bytes


def placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for parts of these sizes, and the total number of bytes."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


class Arena:
    """A first-fit allocator of a block of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Free ranges (start, stop) in ascending order, no two adjacent.
        self._free = [(0, size)] if size else []
        self._lent: dict[int, int] = {}  # the end of each allocated range, by its start

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes. Returns their offset, or None if no free range is large enough."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                self._lent[start] = start + size
                return start
        return None

    def give(self, start: int) -> None:
        """Free the range that begins at this offset."""
        stop = self._lent.pop(start)
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
        insort(self._free, (start, stop))

    @property
    def lent(self) -> int:
        return sum(stop - start for start, stop in self._lent.items())
