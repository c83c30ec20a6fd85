"""A block of queries over several blocks of keys that arrive one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices


@dataclass(eq=False)
class Blocks:
    """The slices of a block of queries over each of several blocks of keys, in order of arrival.

    Attributes:
        slices: of each block of keys.
        derived: what backends derive from all of them together.
    """

    slices: Sequence[Slices]
    derived: Memo = field(default_factory=Memo, repr=False)


class LazySlices(Sequence[Slices]):
    """Slices that are built when a block is computed, while messages of later blocks travel."""

    def __init__(self, builders: Sequence[Callable[[], Slices]]) -> None:
        self._builders = builders

    def __len__(self) -> int:
        return len(self._builders)

    @overload
    def __getitem__(self, block: int) -> Slices: ...
    @overload
    def __getitem__(self, block: slice) -> list[Slices]: ...
    def __getitem__(self, block: int | slice) -> Slices | list[Slices]:
        if isinstance(block, slice):
            return [build() for build in self._builders[block]]
        return self._builders[block]()
