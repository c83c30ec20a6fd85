"""A block of queries over several blocks of keys that arrive one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices


@dataclass(eq=False)
class Blocks:
    """The slices of a block of queries over each of several blocks of keys, in order of arrival."""

    slices: Sequence[Slices]  # one element per block of keys
    derived: Memo = field(default_factory=Memo, repr=False)  # backends' tables of all slices
