"""Layout: which tokens of a packed batch each rank holds.

A packed batch is T tokens in a row, cut into documents by `cu_seqlens`. A layout gives every token to one rank; on a rank
the order is document, then position. Nothing here communicates but `Layout.unshard`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.geometry import CuSeqlens, Geometry, Holding, Ints, as_int, numbers, parse_cu_seqlens

if TYPE_CHECKING:
    from seqpar.comm import Group


class Span(NamedTuple):
    """Positions start … stop − 1 of one document."""

    document: int
    start: int
    stop: int


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
        self.held = [holding.tokens for holding in geometry.holdings]  # how many tokens each rank holds
        self.ranks, self.documents = len(self.held), geometry.lengths.size
        self.pieces = [holding.pieces for holding in geometry.holdings]

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.geometry,)

    def __repr__(self) -> str:
        documents = self.geometry.lengths.size
        return f"Layout(ranks={self.ranks}, documents={documents}, tokens={self.tokens}, tokens_per_rank={self.held})"

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
        number = numbers(count)
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
        return self.held[self._rank(rank)]

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
    length = np.r_[lengths, -1][np.where((documents >= 0) & (documents < lengths.size), documents, -1)]
    inside = (starts >= 0) & (starts <= stops) & (stops <= length)
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
