"""Layout: which tokens of a packed batch each rank holds.

A packed batch is T tokens in a row, cut into documents by `cu_seqlens`. A layout gives every token to one rank. The
order of the tokens on a rank is always document, then position, so all that a rank holds of one document is a *run*: a
stretch of local rows whose positions ascend. Everything here is arithmetic on spans; nothing communicates but
`Layout.unshard`.

Legend: T tokens, P ranks; a *row* is an index into a rank's local tokens, a *position* an index into a document.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from seqpar.comm import Group

Ints = NDArray[np.int64]
CuSeqlens = int | Sequence[int] | NDArray[Any] | Tensor

_DOCUMENT_SHIFT = 32  # a sort key is document << 32 | position: documents and their lengths stay below 2**31


class Span(NamedTuple):
    """Positions start … stop − 1 of one document."""

    document: int
    start: int
    stop: int


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


class Holding:
    """The spans that one rank holds, in local order, as arrays; adjacent spans are joined."""

    def __init__(self, documents: Ints, starts: Ints, stops: Ints) -> None:
        apart = (documents[1:] != documents[:-1]) | (starts[1:] != stops[:-1])
        first, last = np.r_[True, apart][: documents.size], np.r_[apart, True][: documents.size]
        self.documents, self.starts, self.stops = documents[first], starts[first], stops[last]
        self.offsets = np.r_[0, np.cumsum(self.stops - self.starts)]  # local row at which each span begins
        self._keys = (self.documents << _DOCUMENT_SHIFT) | self.starts

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

    def rows_before(self, documents: Ints, positions: Ints) -> Ints:
        """How many local rows precede (document, position): by bisection, vectorised over the arguments."""
        if not self.documents.size:
            return np.zeros_like(documents)
        positions = np.clip(positions, 0, 2**_DOCUMENT_SHIFT - 1)
        span = np.searchsorted(self._keys, (documents << _DOCUMENT_SHIFT) | positions, side="right") - 1
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

    _alive: weakref.WeakValueDictionary[int, Geometry] = weakref.WeakValueDictionary()
    _keys = itertools.count()

    def __init__(self, cu_seqlens: Ints, holdings: list[Holding]) -> None:
        self.cu_seqlens = cu_seqlens
        self.holdings = holdings
        self.lengths = np.diff(cu_seqlens)
        self.tables: weakref.WeakKeyDictionary[Geometry, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.key = next(Geometry._keys)
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

    @cached_property
    def packed(self) -> Geometry:
        """The same documents, all on one rank."""
        held = np.flatnonzero(self.lengths)
        return Geometry(self.cu_seqlens, [Holding(held, np.zeros_like(held), self.lengths[held])])

    def token_indices(self, rank: int) -> Ints:
        """(rows,) index in the packed batch of every row of a rank."""
        holding = self.holdings[rank]
        first = self.cu_seqlens[holding.documents]
        return ranges(first + holding.starts, first + holding.stops)

    @cached_property
    def packed_order(self) -> Ints | None:
        """(T,) where each token of the pack stands in the ranks' rows one after another; None where nothing moves."""
        indices = np.concatenate([self.token_indices(rank) for rank in range(len(self.holdings))])
        order = np.empty_like(indices)
        order[indices] = np.arange(indices.size)
        return None if np.array_equal(order, np.arange(indices.size)) else order

    @cached_property
    def digest(self) -> str:
        """The same for equal geometries, whatever process made them."""
        sha = hashlib.sha256(self.cu_seqlens.tobytes())
        for holding in self.holdings:
            for array in (holding.documents, holding.starts, holding.stops):
                sha.update(array.size.to_bytes(8, "little") + array.tobytes())
        return sha.hexdigest()


class _Owner(np.ndarray[Any, Any]):
    geometry: Geometry


class Layout:
    """Which tokens of a packed batch each rank holds.

    Make one with `contiguous`, `zigzag`, `striped` or `from_spans`. `cu_seqlens` is an int (one document of so many
    tokens), a list, a numpy array or a tensor, from 0 to T without decreasing; a tensor on a GPU costs one
    synchronisation. A dense (B, S) batch needs no layout of its own: describe one row, and it holds for each.

    Layouts are immutable, can be pickled, and own the tables that attention derives from them: make one a batch, use it
    for every layer, and drop it.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.key = geometry.key_tensor()
        self.tokens = geometry.tokens
        self.ranks = len(geometry.holdings)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.geometry,)

    def __repr__(self) -> str:
        held = [holding.tokens for holding in self.geometry.holdings]
        documents = self.geometry.lengths.size
        return f"Layout(ranks={self.ranks}, documents={documents}, tokens={self.tokens}, tokens_per_rank={held})"

    @classmethod
    def _build(cls, cu: Ints, ranks: int, owner: Ints, documents: Ints, starts: Ints, stops: Ints) -> Layout:
        kept = np.flatnonzero(stops > starts)
        kept = kept[np.lexsort((starts[kept], documents[kept], owner[kept]))]
        edges = np.searchsorted(owner[kept], np.arange(ranks + 1))
        parts = [kept[a:b] for a, b in itertools.pairwise(edges)]
        return cls(Geometry(cu, [Holding(documents[part], starts[part], stops[part]) for part in parts]))

    @classmethod
    def contiguous(cls, cu_seqlens: CuSeqlens, ranks: int) -> Layout:
        """Rank c holds tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the pack."""
        cu, ranks = parse_cu_seqlens(cu_seqlens), as_int("ranks", ranks, 1)
        cuts = np.arange(ranks + 1) * cu[-1] // ranks
        edges = np.unique(np.r_[cu, cuts])
        starts, stops = edges[:-1], edges[1:]
        documents = np.searchsorted(cu, starts, side="right") - 1
        owner = np.searchsorted(cuts, starts, side="right") - 1
        first = cu[documents]
        return cls._build(cu, ranks, owner, documents, starts - first, stops - first)

    @classmethod
    def zigzag(cls, cu_seqlens: CuSeqlens, ranks: int) -> Layout:
        """Each document is cut at ⌊cL/2P⌋; rank c holds chunks c and 2P−1−c, so that causal work is even."""
        cu, ranks = parse_cu_seqlens(cu_seqlens), as_int("ranks", ranks, 1)
        chunk = np.arange(2 * ranks)
        edges = np.diff(cu)[:, None] * np.arange(2 * ranks + 1) // (2 * ranks)
        owner = np.tile(np.minimum(chunk, 2 * ranks - 1 - chunk), cu.size - 1)
        documents = np.repeat(np.arange(cu.size - 1), 2 * ranks)
        return cls._build(cu, ranks, owner, documents, edges[:, :-1].ravel(), edges[:, 1:].ravel())

    @classmethod
    def striped(cls, cu_seqlens: CuSeqlens, ranks: int, stripe: int = 128) -> Layout:
        """Stripe s (of `stripe` tokens) of each document goes to rank s mod P."""
        cu, ranks = parse_cu_seqlens(cu_seqlens), as_int("ranks", ranks, 1)
        stripe = as_int("stripe", stripe, 1)
        lengths = np.diff(cu)
        count = -(-lengths // stripe)
        documents = np.repeat(np.arange(lengths.size), count)
        number = ranges(np.zeros_like(count), count)
        starts = number * stripe
        return cls._build(cu, ranks, number % ranks, documents, starts, np.minimum(starts + stripe, lengths[documents]))

    @classmethod
    def from_spans(cls, spans_per_rank: Sequence[Iterable[tuple[int, int, int]]], cu_seqlens: CuSeqlens) -> Layout:
        """A layout from a list of (document, start, stop) for each rank, in any order.

        Together the spans must cover every token once. Spans of one rank that touch are joined.
        """
        cu, per_rank = parse_cu_seqlens(cu_seqlens), [list(spans) for spans in spans_per_rank]
        as_int("spans_per_rank: the number of ranks", len(per_rank), 1)
        try:
            table = np.array([tuple(span) for spans in per_rank for span in spans]).reshape(-1, 3)
        except ValueError:
            raise ValueError("spans_per_rank must hold (document, start, stop) triples of integers") from None
        if table.size and table.dtype.kind not in "iu":
            raise ValueError(f"spans_per_rank must hold integers, got {table.dtype}")
        documents, starts, stops = table.astype(np.int64).T
        owner = np.repeat(np.arange(len(per_rank)), [len(spans) for spans in per_rank])
        _check_cover(cu, documents, starts, stops)
        return cls._build(cu, len(per_rank), owner, documents, starts, stops)

    @property
    def cu_seqlens(self) -> Ints:
        """(documents + 1,) int64 array of document boundaries, from 0 to T; a copy."""
        return self.geometry.cu_seqlens.copy()

    def spans(self, rank: int) -> list[Span]:
        """What a rank holds, in its local order; adjacent spans are joined into one."""
        holding = self.geometry.holdings[self._rank(rank)]
        columns = (holding.documents.tolist(), holding.starts.tolist(), holding.stops.tolist())
        return [Span(*span) for span in zip(*columns, strict=True)]

    def tokens_on(self, rank: int) -> int:
        """T_local: how many tokens a rank holds."""
        return self.geometry.holdings[self._rank(rank)].tokens

    def token_indices(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """(T_local,) int64: the index in the packed batch of each of a rank's tokens."""
        return torch.from_numpy(self.geometry.token_indices(self._rank(rank))).to(device)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """(T_local,) int64: the position inside its document of each of a rank's tokens (for RoPE)."""
        return torch.from_numpy(self.geometry.holdings[self._rank(rank)].positions.astype(np.int64)).to(device)

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """A rank's part of a packed tensor: (T, …) -> (T_local, …) along `dim`. A copy; no communication.

        Differentiable; the gradient reaches only this rank's tokens.
        """
        indices = self.token_indices(rank, x.device)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            raise ValueError(f"x must have {self.tokens} tokens (the layout's) along dim {dim}, got {tuple(x.shape)}")
        return x.index_select(dim, indices)

    def unshard(self, x_local: Tensor, group: Group, dim: int = 0) -> Tensor:
        """The packed tensor from every rank's part: (T_local, …) -> (T, …) along `dim`, on every rank.

        Differentiable: the backward sums the gradients of all ranks at the token's owner, in rank order. Each direction
        sends (P−1)·T_local rows, or their gradients (T − T_local rows).
        """
        from seqpar.reshard import unshard

        return unshard(x_local, self, group, dim)

    def _rank(self, rank: int) -> int:
        if not 0 <= as_int("rank", rank, 0) < self.ranks:
            raise ValueError(f"rank must be below the layout's {self.ranks} ranks, got {rank}")
        return rank


def _check_cover(cu: Ints, documents: Ints, starts: Ints, stops: Ints) -> None:
    """Raise unless the spans cover each token of each document exactly once."""
    lengths = np.diff(cu)
    inside = (documents >= 0) & (documents < lengths.size)
    inside &= (starts >= 0) & (starts <= stops) & (stops <= lengths[np.where(inside, documents, 0)] if lengths.size else 0)
    if not inside.all():
        i = int(np.argmin(inside))
        span = Span(int(documents[i]), int(starts[i]), int(stops[i]))
        raise ValueError(f"spans_per_rank: {span} lies outside its document; there are {lengths.size} documents")
    nonempty = np.flatnonzero(stops > starts)
    order = nonempty[np.lexsort((starts[nonempty], documents[nonempty]))]
    begin, end = cu[documents[order]] + starts[order], cu[documents[order]] + stops[order]
    expected, found = np.r_[0, end], np.r_[begin, cu[-1]]
    if (expected != found).any():
        i = int(np.argmax(expected != found))
        what = "overlap" if found[i] < expected[i] else "leave a gap"
        low, high = sorted((int(expected[i]), int(found[i])))
        raise ValueError(f"spans_per_rank: the spans {what} at tokens {low} to {high - 1} of the packed batch")


def shift_labels(ids: Tensor, cu_seqlens: CuSeqlens) -> Tensor:
    """Next-token labels: (T,) or (…, T) ids -> the same shape, the following token within the document.

    The last token of each document, which has no successor, gets −100, the index that `cross_entropy` ignores. Shift
    before you shard: on a rank the next row is often not the next token.
    """
    cu = parse_cu_seqlens(cu_seqlens)
    if ids.dim() == 0 or ids.shape[-1] != cu[-1]:
        raise ValueError(f"ids must have the {cu[-1]} tokens of cu_seqlens in its last dimension, got {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"ids must be of a signed integer dtype, to hold -100, got {ids.dtype}")
    labels = ids.roll(-1, -1)
    labels[..., torch.from_numpy(cu[1:][np.diff(cu) > 0] - 1).to(ids.device)] = -100
    return labels


