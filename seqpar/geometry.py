"""Geometry: who holds which tokens, as arrays of spans; what a Layout is apart from the methods its users call.

The order of the tokens on a rank is always document, then position, so all that a rank holds of one document is a *run*: a
stretch of local rows whose positions ascend. A *row* is an index into a rank's local tokens, a *position* an index into a
document.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
CuSeqlens = int | Sequence[int] | NDArray[Any] | Tensor

SPAN = ("documents", "starts", "stops")  # the columns of a Holding
_DOCUMENT_SHIFT = 32  # a sort key is document << 32 | position: documents and their lengths stay below 2**31


def as_int(name: str, value: Any, minimum: int) -> int:
    """`value` as a Python int of at least `minimum`, or a ValueError naming the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def as_int_array(name: str, values: CuSeqlens) -> Ints:
    """`values` as a 1-D int64 array, or a ValueError naming the argument. A CUDA tensor costs one synchronisation."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a 1-D sequence of integers, got shape {array.shape} of {array.dtype}")
    return array.astype(np.int64)


def as_int_tensor(name: str, values: CuSeqlens) -> Tensor:
    """`values` as a 1-D int64 tensor on the CPU, or a ValueError naming the argument; traceable from a tensor."""
    if not isinstance(values, Tensor):
        return torch.from_numpy(as_int_array(name, values))
    if values.dim() != 1 or values.is_floating_point():
        raise ValueError(f"{name} must be a 1-D sequence of integers, got shape {tuple(values.shape)} of {values.dtype}")
    return values.to("cpu", torch.int64)


def parse_cu_seqlens(cu_seqlens: CuSeqlens) -> Ints:
    """`cu_seqlens` as an int64 array; an int is the length of a single document."""
    if isinstance(cu_seqlens, int | np.integer):
        return np.array([0, as_int("cu_seqlens", cu_seqlens, 0)])
    cu = as_int_array("cu_seqlens", cu_seqlens)
    if not cu.size or cu[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {cu[:1].tolist()}")
    lengths = np.diff(cu)
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"cu_seqlens must not decrease, got {cu[i]} and then {cu[i + 1]} at index {i + 1}")
    if lengths.size and lengths.max() >= 2**31:
        raise ValueError(f"cu_seqlens: a document must be shorter than 2**31 tokens, got {lengths.max()}")
    return cu


def ranges(starts: Ints, stops: Ints) -> Ints:
    """The integers of all [start, stop) one after another."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if ends.size else 0)


def numbers(counts: Ints) -> Ints:
    """0 … count − 1 for each count, one after another."""
    return ranges(np.zeros_like(counts), counts)


def keys(documents: Ints, positions: Ints) -> Ints:
    """Integers that are in the order of documents, then positions."""
    return documents << _DOCUMENT_SHIFT | positions


class Holding:
    """The spans that one rank holds, in local order, as arrays; adjacent spans are joined."""

    def __init__(self, documents: Ints, starts: Ints, stops: Ints) -> None:
        apart = (documents[1:] != documents[:-1]) | (starts[1:] != stops[:-1])
        first, last = np.r_[True, apart][: documents.size], np.r_[apart, True][: documents.size]
        self.documents, self.starts, self.stops = documents[first], starts[first], stops[last]
        self.offsets = np.r_[0, np.cumsum(self.stops - self.starts)]  # local row at which each span begins
        self._keys = keys(self.documents, self.starts)

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """(tokens,) position of every row in its document."""
        return ranges(self.starts, self.stops).astype(np.int32)

    @cached_property
    def runs(self) -> tuple[Ints, Ints, Ints]:
        """(documents, first span, one past the last span), an entry a run."""
        documents, first = np.unique(self.documents, return_index=True)
        return documents, first, np.r_[first[1:], self.documents.size][: first.size]

    @property
    def pieces(self) -> tuple[int, int, int]:
        """How many spans, how many runs, and how many spans that do not begin their document."""
        return self.documents.size, self.runs[0].size, int(np.count_nonzero(self.starts))

    def rows_before(self, documents: Ints, positions: Ints) -> Ints:
        """How many local rows precede (document, position): by bisection, vectorised over the arguments."""
        if not self.documents.size:
            return np.zeros_like(documents)
        positions = np.clip(positions, 0, 2**_DOCUMENT_SHIFT - 1)
        span = np.searchsorted(self._keys, keys(documents, positions), side="right") - 1
        at = np.maximum(span, 0)
        length = self.stops[at] - self.starts[at]
        inside = np.where(self.documents[at] == documents, np.minimum(positions - self.starts[at], length), length)
        return np.where(span < 0, 0, self.offsets[at] + inside)


class Geometry:
    """What a layout is, apart from the methods its users call: documents, and a Holding for each rank.

    It also owns what is derived from it (slice tables), which is therefore freed with it. The operators find a geometry
    by `key`, an integer in a CPU tensor: a compiled graph then takes the layout as data and neither specialises on it nor
    recompiles for the next batch. The tensor's storage keeps the geometry alive, so that a backward may outlive the
    layout its forward was called with.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[int, Geometry]] = weakref.WeakValueDictionary()
    _counter: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, cu_seqlens: Ints, holdings: list[Holding]) -> None:
        self.cu_seqlens = cu_seqlens
        self.holdings = holdings
        self.lengths = np.diff(cu_seqlens)
        self.tables: weakref.WeakKeyDictionary[Geometry, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.plans: dict[Any, Any] = {}
        self._joined: dict[int, Geometry] = {}
        self._rows_in_joined: dict[tuple[int, int], list[Ints] | None] = {}
        self.key = next(Geometry._counter)
        Geometry._alive[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Geometry, (self.cu_seqlens, self.holdings)

    @staticmethod
    def of(key: Tensor) -> Geometry:
        """The geometry whose `key_tensor` this is."""
        return Geometry._alive[int(key)]

    def key_tensor(self) -> Tensor:
        owner = np.full((), self.key, dtype=np.int64).view(_Owner)
        owner.geometry = self
        return torch.from_numpy(owner)

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    def joined(self, size: int) -> Geometry:
        """The same documents with each `size` consecutive ranks as one, which holds what they hold together."""
        if size not in self._joined:
            holdings = []
            for first in range(0, len(self.holdings), size):
                parts = self.holdings[first : first + size]
                spans = np.array([np.concatenate([getattr(x, name) for x in parts]) for name in SPAN])
                holdings.append(Holding(*spans[:, np.lexsort(spans[1::-1])]))
            self._joined[size] = Geometry(self.cu_seqlens, holdings)
        return self._joined[size]

    def rows_in_joined(self, rank: int, size: int) -> list[Ints] | None:
        """Where the rows of each of the ranks that are joined with this one stand; None where they follow one another."""
        first = rank // size * size
        if (size, first) not in self._rows_in_joined:
            indices = [self.token_indices(first + i) for i in range(size)]
            order = np.argsort(np.concatenate(indices))
            row = np.empty_like(order)
            row[order] = np.arange(order.size)
            parts = np.split(row, np.cumsum([part.size for part in indices])[:-1])
            self._rows_in_joined[size, first] = None if (order[1:] > order[:-1]).all() else parts
        return self._rows_in_joined[size, first]

    def token_indices(self, rank: int) -> Ints:
        """(rows,) index in the packed batch of every row of a rank."""
        holding = self.holdings[rank]
        first = self.cu_seqlens[holding.documents]
        return ranges(first + holding.starts, first + holding.stops)

    @cached_property
    def digest(self) -> str:
        """The same for equal geometries, whatever process made them."""
        sha = hashlib.sha256(self.cu_seqlens.tobytes())
        for holding in self.holdings:
            for array in (getattr(holding, name) for name in SPAN):
                sha.update(array.size.to_bytes(8, "little") + array.tobytes())
        return sha.hexdigest()


class _Owner(np.ndarray[Any, Any]):
    geometry: Geometry
