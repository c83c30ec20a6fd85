"""A block of queries over several blocks of keys that arrive one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices


@dataclass(eq=False)
class Blocks:
    """The slices of a block of queries over each of several blocks of keys, in order of arrival.

    Attributes:
        slices: one element per block of keys.
        derived: tables that backends derive from all slices together.
    """

    slices: Sequence[Slices]
    derived: Memo = field(default_factory=Memo, repr=False)
