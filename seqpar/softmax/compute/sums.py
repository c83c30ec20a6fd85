"""Sums of the results of several kernels, allocated when a second result comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Sums:
    """Sums of the results that several kernel calls return for the same rows.

    The first results may be kept as their kernel returned them. They become sums when they are
    needed as sums. A call whose results remain the only ones writes and reads no sums.
    """

    def __init__(self, make: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """`make` returns sums that begin with the results that were kept, if any, or with 0."""
        self._make, self._kept = make, tuple[Tensor, ...]()
        self._made: Sequence[Tensor] | None = None

    @classmethod
    def of(cls, *tensors: Tensor) -> Sums:
        """Return these tensors as sums."""
        sums = cls(lambda _: tensors)
        sums.allocate()
        return sums

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The sums, which callers may change in place."""
        if self._made is None:
            self._made, self._kept = self._make(self._kept), ()
        return self._made

    @property
    def results(self) -> Sequence[Tensor]:
        """The only results, as their kernel returned them, or the sums."""
        return self._kept or self.tensors

    def keep(self, *results: Tensor) -> bool:
        """Keep the first results, of all rows; return False if sums or other results exist."""
        if self._kept or self._made is not None:
            return False
        self._kept = results
        return True

    def allocate(self) -> None:
        """Make the sums now."""
        _ = self.tensors

    def release(self) -> None:
        """Turn results that were kept into sums, before a kernel allocates other results."""
        if self._kept:
            self.allocate()
