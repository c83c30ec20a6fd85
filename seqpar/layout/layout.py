"""Layout: which tokens of a packed batch each rank holds.

A packed batch is T tokens in a row, cut into documents by `cu_seqlens`. A layout gives every token
to one rank; on a rank the order is document, then position. Only `Layout.unshard` communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import (
    LONGEST_DOCUMENT,
    SIGNED,
    CuSeqlens,
    Ints,
    as_int,
    as_ranks,
    as_tensor,
    parse_cu_seqlens,
    to_device,
)
from seqpar.comm.exchange import Group
from seqpar.compiling import outside_graphs
from seqpar.layout import indices
from seqpar.layout.cuts import Contiguous, LayoutCut, Spans, Striped, Zigzag
from seqpar.layout.handle import make_handle, make_sizes, sizes_of, tokens_of
from seqpar.layout.plot import plot_layouts
from seqpar.layout.reshard import unshard


class Span(NamedTuple):
    """Positions start … stop − 1 of one document."""

    document: int
    start: int
    stop: int


class Layout:
    """Which tokens of a packed batch each rank holds.

    Make one with `contiguous`, `zigzag`, `striped` or `from_spans`. `cu_seqlens` is an int (one
    document of so many tokens), a list, a numpy array or a tensor, from 0 to T without decreasing;
    a tensor on a GPU costs one synchronisation. A dense (B, S) batch needs no layout of its own:
    describe one row, and it holds for each.

    Layouts are immutable, can be pickled, and own the tables that attention derives from them: make
    one a batch, use it for every layer, and drop it.

    Attributes:
        ranks: P, how many ranks it is spread over.
        tokens_per_rank: T_local, how many tokens each rank holds.
        geometry: the same information as arrays, for code that builds on layouts.
    """

    def __init__(self, cu_seqlens: Ints, cut: LayoutCut) -> None:
        self.geometry, self._handle = make_handle(cu_seqlens, cut)
        self.ranks, counts = cut.ranks, cut.counts(cu_seqlens)
        self.tokens_per_rank: list[int] = counts.tokens.tolist()
        self._sizes = make_sizes(cu_seqlens.size - 1, counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.geometry.cu_seqlens, self.geometry.cut)

    @outside_graphs
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        one, two = self.geometry, other.geometry
        return one is two or (
            np.array_equal(one.cu_seqlens, two.cu_seqlens)
            and self.tokens_per_rank == other.tokens_per_rank
            and one.digest == two.digest
        )

    @outside_graphs
    def __hash__(self) -> int:
        content = self.geometry.cu_seqlens
        return self.geometry.derived(
            ("hash",), lambda: hash((content.tobytes(), *self.tokens_per_rank))
        )

    def __repr__(self) -> str:
        return (
            f"Layout(ranks={self.ranks}, documents={self.documents}, tokens={self.tokens}, "
            f"tokens_per_rank={self.tokens_per_rank})"
        )

    @classmethod
    @outside_graphs
    def contiguous(cls, cu_seqlens: CuSeqlens, ranks: int) -> Layout:
        """Give rank c tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the pack."""
        return cls(parse_cu_seqlens(cu_seqlens), Contiguous(as_ranks("ranks", ranks)))

    @classmethod
    @outside_graphs
    def zigzag(cls, cu_seqlens: CuSeqlens, ranks: int) -> Layout:
        """Cut each document of L tokens into 2P chunks at ⌊cL/2P⌋; rank c holds c and 2P−1−c.

        So each rank has the same work under a causal mask.
        """
        return cls(parse_cu_seqlens(cu_seqlens), Zigzag(as_ranks("ranks", ranks)))

    @classmethod
    @outside_graphs
    def striped(cls, cu_seqlens: CuSeqlens, ranks: int, stripe: int = 128) -> Layout:
        """Cut each document into stripes of `stripe` tokens; rank s mod P holds stripe s."""
        cu, ranks = parse_cu_seqlens(cu_seqlens), as_ranks("ranks", ranks)
        longest = LONGEST_DOCUMENT  # longer stripes are as good
        return cls(cu, Striped(ranks, min(as_int("stripe", stripe, 1), longest)))

    @classmethod
    @outside_graphs
    def from_spans(
        cls, spans_per_rank: Sequence[Iterable[tuple[int, int, int]]], cu_seqlens: CuSeqlens
    ) -> Layout:
        """Make a layout from a list of (document, start, stop) for each rank, in any order.

        Together the spans must cover every token once. Spans of one rank that touch are joined.
        """
        cu, expected = parse_cu_seqlens(cu_seqlens), "(document, start, stop) triples of integers"
        try:
            per_rank = [[tuple(span) for span in spans] for spans in spans_per_rank]
        except TypeError:
            raise TypeError(f"spans_per_rank must hold {expected} for each rank") from None
        as_ranks("spans_per_rank: the number of ranks", len(per_rank))
        flat = [span for spans in per_rank for span in spans]
        if any(len(span) != 3 for span in flat):
            raise ValueError(f"spans_per_rank must hold {expected}")
        table = np.array(flat).reshape(-1, 3)
        if table.size and table.dtype.kind not in "iu":
            raise ValueError(f"spans_per_rank must hold {expected}, got {table.dtype}")
        documents, starts, stops = table.astype(np.int64).T
        owner = np.repeat(np.arange(len(per_rank)), [len(spans) for spans in per_rank])
        _check_cover(cu, documents, starts, stops)
        return cls(cu, Spans.of(len(per_rank), owner, documents, starts, stops))

    @property
    def tokens(self) -> int:
        """T: how many tokens the packed batch has."""
        return self._tokens_on(slice(0, self.ranks))

    @property
    def documents(self) -> int:
        """How many documents the packed batch has."""
        return sizes_of(self._sizes[0]).documents

    @property
    @outside_graphs
    def cu_seqlens(self) -> Ints:
        """(documents + 1,) int64 array of document boundaries, from 0 to T; a copy."""
        return self.geometry.cu_seqlens.copy()

    @outside_graphs
    def spans(self, rank: int) -> list[Span]:
        """Return the spans that a rank holds, in its local order; adjacent ones are joined."""
        holding = self.geometry.holdings[self._rank(rank)]
        columns = (holding.documents.tolist(), holding.starts.tolist(), holding.stops.tolist())
        return [Span(*span) for span in zip(*columns, strict=True)]

    def tokens_on(self, rank: int) -> int:
        """Return T_local: how many tokens a rank holds."""
        rank = self._rank(rank)
        return self._tokens_on(slice(rank, rank + 1))

    def token_indices(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return (T_local,) int64: the index in the packed batch of each of a rank's tokens."""
        return to_device(self._numbers("token_indices", rank), device)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return (T_local,) int64: each token's position inside its document, for RoPE."""
        return to_device(self._numbers("position_ids", rank), device)

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's part of a packed tensor: (T, …) -> (T_local, …) along `dim`.

        It is a copy, and nothing is communicated. It is differentiable; the gradient reaches only
        this rank's tokens.
        """
        x, dim = as_tensor("x", x), as_int("dim", dim)
        held = self.token_indices(rank, x.device)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            where, found = f"along dim {dim}", tuple(x.shape)
            raise ValueError(
                f"x must have {self.tokens} tokens (the layout's) {where}, got {found}"
            )
        return x.index_select(dim, held)

    @outside_graphs
    def unshard(self, x_local: Tensor, group: Group, dim: int = 0) -> Tensor:
        """Return the packed tensor from every rank's part: (T_local, …) -> (T, …), on every rank.

        It is differentiable: backward sums the gradients of all ranks at the rank that holds the
        token, in rank order. Each rank sends (P − 1)·T_local rows in forward, and the gradients of
        T − T_local rows in backward.
        """
        return unshard(x_local, self.geometry, group, dim)

    @outside_graphs
    def plot(self, path: str | Path) -> None:
        """Draw which rank holds which token, and each rank's work under a causal mask, into `path`.

        `seqpar.layout.plot.plot_layouts({name: layout}, path)` compares several layouts in one
        picture. This needs matplotlib.
        """
        plot_layouts({"": self}, path)

    def _numbers(self, name: str, rank: int) -> Tensor:
        """Return token indices or position ids; in a graph, by the operator of that name.

        Only there, since under a FakeTensorMode operators do not take real handles.
        """
        rank = self._rank(rank)
        if not torch.compiler.is_compiling():
            eager: Tensor = getattr(indices, name)(self.geometry, rank)
            return eager
        traced: Tensor = getattr(torch.ops.seqpar, name)(self._handle, rank, self.tokens_on(rank))
        return traced

    def _tokens_on(self, ranks: slice) -> int:
        """Return how many tokens consecutive ranks hold, in a way that torch.compile can trace."""
        first, behind = (min(edge, self.ranks) for edge in (ranks.start, ranks.stop))
        return tokens_of(self._sizes, range(first, behind))

    def _rank(self, rank: int) -> int:
        number = as_int("rank", rank, 0)
        if number >= self.ranks:
            raise ValueError(f"rank must be below the layout's {self.ranks} ranks, got {number}")
        return number


def _check_cover(cu: Ints, documents: Ints, starts: Ints, stops: Ints) -> None:
    """Raise unless the spans cover each token of each document exactly once."""
    lengths = np.diff(cu)
    length = np.r_[lengths, -1][
        np.where((documents >= 0) & (documents < lengths.size), documents, -1)
    ]
    inside = (starts >= 0) & (starts <= stops) & (stops <= length)
    if not inside.all():
        i = int(np.argmin(inside))
        span = Span(int(documents[i]), int(starts[i]), int(stops[i]))
        raise ValueError(
            f"spans_per_rank: {span} lies outside its document; there are {lengths.size} documents"
        )
    nonempty = np.flatnonzero(stops > starts)
    order = nonempty[np.lexsort((starts[nonempty], documents[nonempty]))]
    begin, end = cu[documents[order]] + starts[order], cu[documents[order]] + stops[order]
    expected, found = np.r_[0, end], np.r_[begin, cu[-1]]
    if (expected != found).any():
        i = int(np.argmax(expected != found))
        what = "overlap" if found[i] < expected[i] else "leave a gap"
        low, high = sorted((int(expected[i]), int(found[i])))
        raise ValueError(
            f"spans_per_rank: the spans {what} at tokens {low} to {high - 1} of the packed batch"
        )


@outside_graphs
def shift_labels(ids: Tensor, cu_seqlens: CuSeqlens) -> Tensor:
    """Return next-token labels, of the shape of `ids`, (T,) or (…, T).

    The label of a token is the id of the next token of its document. The last token of each
    document has no next one and gets −100, the index that `cross_entropy` ignores. Shift before you
    shard: on a rank the next row is often not the next token.
    """
    ids, cu = as_tensor("ids", ids), parse_cu_seqlens(cu_seqlens)
    if ids.dim() == 0 or ids.shape[-1] != cu[-1]:
        expected, found = f"the {cu[-1]} tokens of cu_seqlens", tuple(ids.shape)
        raise ValueError(f"ids must have {expected} in its last dimension, got {found}")
    if ids.dtype not in SIGNED:
        raise ValueError(f"ids must be of a signed integer dtype, to hold -100, got {ids.dtype}")
    labels = ids.roll(-1, -1)
    labels[..., torch.from_numpy(cu[1:][np.diff(cu) > 0] - 1).to(ids.device)] = -100
    return labels
