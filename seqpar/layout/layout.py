"""`Layout`, which assigns each token of a packed batch to a rank.

A packed batch is a sequence of T tokens, which `cu_seqlens` cuts into documents. The tokens on a
rank are ordered by document, and within a document by position. Only `unshard` and `remap`
communicate.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    CuSeqlens,
    Ints,
    as_choice,
    as_int,
    check_tensor,
    parse_cu_seqlens,
    shown,
    to_device,
)
from seqpar.core.compiling import is_traced, outside_graphs
from seqpar.core.device_tables import pin
from seqpar.core.memo import LOCAL
from seqpar.layout import handle
from seqpar.layout.cuts.contiguous import Contiguous
from seqpar.layout.cuts.dealing import padded
from seqpar.layout.cuts.fixed_chunks import FixedChunks, cut_into_fixed_chunks
from seqpar.layout.cuts.striped import EvenStripes, Striped
from seqpar.layout.cuts.zigzag import EvenZigzag, Zigzag
from seqpar.layout.handle import LayoutCut
from seqpar.layout.plot import plot_layouts
from seqpar.layout.prepared import pack, unpack
from seqpar.layout.replaced import load_tables
from seqpar.layout.reshard import remap, shard, unshard
from seqpar.layout.spans import PositionIds, Span, cu_seqlens_of, parse_spans


class Prepares(Protocol):
    """A module that can build the tables of a layout before its first call."""

    def preparation(self, **call: Any) -> Callable[[Layout], Layout]:
        """Return a function that builds the tables of a layout for this kind of call."""


class Layout:
    """The assignment of a packed batch's tokens to ranks.

    Create a layout with `contiguous`, `zigzag`, `striped`, `from_position_ids` or `from_spans`.
    `cu_seqlens` is a list, a numpy array or a tensor of any integer dtype. It ascends from 0 to T,
    and values may repeat. A tensor on a GPU costs one synchronisation. An int stands for one
    document with that number of tokens. For a dense (B, S) batch, describe one row. The layout
    applies to every row of the batch. A ValueError names a wrong argument.

    With `equal=True`, each rank holds ⌈T/P⌉ tokens, rounded up to a multiple of `multiple_of`, for
    any documents. The padding is an additional last document, which exists even if it has no
    tokens. `tokens`, `documents` and `cu_seqlens` include the padding. The method `padding` returns
    which tokens are padding.

    A layout is immutable and can be pickled. It stores the tables that attention derives from it.
    Create one layout per batch, use it for every layer, and then drop it.

    Attributes:
        ranks: P, the number of ranks.
        tokens_per_rank: T_local, the number of tokens on each rank.
        geometry: the same information as arrays, for code that builds on layouts.
    """

    def __init__(self, cu_seqlens: Ints, cut: LayoutCut, padding: int = 0) -> None:
        self.geometry, self._handle = handle.make_handle(cu_seqlens, cut)
        self.ranks, counts = cut.ranks, cut.counts(cu_seqlens)
        self.tokens_per_rank: list[int] = counts.tokens.tolist()
        self._sizes = handle.make_sizes(cu_seqlens.size - 1, padding, counts)
        self._takes_tables = False  # whether a pickled layout includes its tables
        self._packed: tuple[Tensor, int] | None = None  # the tables with which it was pickled

    def __reduce__(self) -> tuple[object, ...]:
        content = self.geometry.cu_seqlens, self.geometry.cut, self._padding
        packed = pack(self.geometry) if self._takes_tables else None
        return (Layout, content) if packed is None else (Layout._with_packed, content + packed)

    @outside_graphs
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        alike = self.tokens_per_rank == other.tokens_per_rank and self._padding == other._padding
        return alike and self.geometry.same_as(other.geometry)

    @outside_graphs
    def __hash__(self) -> int:
        cu, per_rank = self.geometry.cu_seqlens, self.tokens_per_rank
        return self.geometry.derived((LOCAL, "hash"), lambda: hash((cu.tobytes(), *per_rank)))

    def __repr__(self) -> str:
        sizes = f"ranks={self.ranks}, documents={self.documents}, tokens={self.tokens}"
        return f"Layout({sizes}, tokens_per_rank={self.tokens_per_rank})"

    @classmethod
    @outside_graphs
    def contiguous(
        cls,
        cu_seqlens: CuSeqlens,
        ranks: int,
        *,
        equal: bool = False,
        multiple_of: int = 1,
        most_documents: int | None = None,
    ) -> Layout:
        """Give rank c of P ranks the tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the pack, padding included.

        With `most_documents`, the layout gets additional empty documents, so that it has this
        number of documents. This option requires `equal`. If two layouts have the same
        `most_documents` and the same number of tokens, calls with these layouts run the same
        kernels and send messages of the same sizes. Only the contents of the tables that kernels
        read differ. A CUDA graph that was captured with one layout can therefore compute attention
        for the other layout (`load_tables`). Messages are as large as if all tokens belonged to a
        single document, and GPUs use our Triton kernels. Only ring, all_gather, ulysses, and usp
        over ring or all_gather accept a layout with `most_documents`, with the masks that `causal`
        and `window_size` make.
        """
        cu, ranks, padding = padded(cu_seqlens, ranks, equal, multiple_of)
        if most_documents is None:
            return cls(cu, Contiguous(ranks), padding)
        limit = as_int("most_documents", most_documents, 1, 2**31 - 2)
        if not equal:
            raise ValueError(f"most_documents needs equal=True, got {limit} without it")
        if (missing := limit + 2 - cu.size) < 0:
            raise ValueError(f"cu_seqlens must have at most {limit} documents, got {cu.size - 2}")
        cu = np.r_[cu[:-1], np.full(missing, cu[-2]), cu[-1]]
        return cls(cu, Contiguous(ranks, limit + 1, secrets.randbits(62)), padding)

    @classmethod
    @outside_graphs
    def zigzag(
        cls,
        cu_seqlens: CuSeqlens,
        ranks: int,
        *,
        equal: bool = False,
        multiple_of: int = 1,
        min_chunk: int | None = None,
    ) -> Layout:
        """Cut each document of L tokens at ⌊cL/2P⌋ into 2P chunks. Rank c holds chunks c and 2P − 1
        − c.

        Under a causal mask, all ranks have about the same work. With `equal`, the chunks of a
        document differ by up to two tokens, so that all ranks hold the same number of tokens of the
        pack.

        With `min_chunk`, documents of fewer than 2P·min_chunk tokens are cut into fewer chunks, or
        are not cut. These documents are dealt to the ranks in parts of 2·min_chunk tokens,
        beginning with the longest document. Each rank holds ⌈T/P⌉ tokens. If T is not a multiple of
        P, the last ranks together hold up to P − 1 tokens fewer. Ranks have nearly the same work if
        there are enough of these documents for all ranks.
        """
        cu, ranks, padding = padded(cu_seqlens, ranks, equal, multiple_of)
        if min_chunk is not None:
            min_chunk = min(as_int("min_chunk", min_chunk, 1), MAX_DOCUMENT_TOKENS)
        elif not equal:
            return cls(cu, Zigzag(ranks))
        return cls(cu, EvenZigzag(ranks, min_chunk or 0), padding)

    @classmethod
    @outside_graphs
    def striped(
        cls,
        cu_seqlens: CuSeqlens,
        ranks: int,
        stripe: int | None = None,
        *,
        equal: bool = False,
        multiple_of: int = 1,
    ) -> Layout:
        """Cut each document into stripes of `stripe` tokens. Rank s mod P holds stripe s.

        A *stripe* is a range of consecutive tokens. By default, a stripe has 128 tokens. If some
        ranks would get no tokens with stripes of 128 tokens, stripes are counted through the whole
        packed batch instead of separately for each document. In this case, a stripe has an eighth
        of a rank's tokens, but at most 128 tokens. The last P stripes are smaller, so that each
        rank holds ⌈T/P⌉ tokens. If T is not a multiple of P, the last ranks together hold up to P −
        1 tokens fewer.

        With `equal`, stripes are counted through the whole packed batch for any `stripe`.
        """
        cu, ranks, padding = padded(cu_seqlens, ranks, equal, multiple_of)
        if stripe is not None:
            stripe = min(as_int("stripe", stripe, 1), MAX_DOCUMENT_TOKENS)
        longest = int(np.diff(cu).max(initial=0))
        if not equal and (stripe is not None or longest > 128 * (ranks - 1)):
            return cls(cu, Striped(ranks, stripe or 128))
        eighth = int(cu[-1]) // (8 * ranks)
        return cls(cu, EvenStripes(ranks, stripe or min(max(eighth, 1), 128)), padding)

    @classmethod
    @outside_graphs
    def from_position_ids(
        cls, position_ids: PositionIds, ranks: int, kind: str = "zigzag", **options: object
    ) -> Layout:
        """Create a layout from each token's position in its document, (T,) or (B, S).

        The rows of (B, S) follow one another in the pack, so they may hold different documents. A
        document begins at the start of each row, and at each token whose position is not the
        preceding position plus one. The first position of a document must be 0.

        Args:
            position_ids: the positions.
            ranks: the number of ranks.
            kind: "contiguous", "zigzag" or "striped".
            options: the arguments of the method `kind`.
        """
        as_choice("kind", kind, ("contiguous", "zigzag", "striped"))
        make: Callable[..., Layout] = getattr(cls, kind)
        return make(cu_seqlens_of(position_ids), ranks, **options)

    @classmethod
    @outside_graphs
    def from_spans(
        cls, spans_per_rank: Sequence[Iterable[tuple[int, int, int]]], cu_seqlens: CuSeqlens
    ) -> Layout:
        """Create a layout from the spans (document, start, stop) of each rank, in any order.

        The spans of all ranks together must cover every token exactly once. If tokens are missing
        or covered twice, a ValueError names these tokens. Adjacent spans of one rank are joined.
        """
        cu = parse_cu_seqlens(cu_seqlens)
        return cls(cu, parse_spans(spans_per_rank, cu))

    @property
    def tokens(self) -> int:
        """T, the number of tokens of the packed batch."""
        return self._tokens_on(slice(0, self.ranks))

    @property
    def documents(self) -> int:
        """The number of documents of the packed batch."""
        return handle.sizes_of(self._sizes[0]).documents

    @property
    @outside_graphs
    def cu_seqlens(self) -> Ints:
        """A copy of the document boundaries, from 0 to T, (documents + 1,) int64."""
        return self.geometry.cu_seqlens.copy()

    @outside_graphs
    def spans(self, rank: int) -> list[Span]:
        """Return the spans that a rank holds, in its local order. Adjacent spans are joined."""
        columns = [x.tolist() for x in self.geometry.holdings[self._rank(rank)].columns]
        return [Span(*span) for span in zip(*columns, strict=True)]

    def tokens_on(self, rank: int) -> int:
        """Return T_local, the number of tokens that a rank holds."""
        rank = self._rank(rank)
        return self._tokens_on(slice(rank, rank + 1))

    def token_indices(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the index of each of a rank's tokens in the packed batch, (T_local,) int64."""
        return to_device(self._numbers("token_indices", rank), device)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each of a rank's tokens in its document, (T_local,) int64, for
        RoPE.
        """
        return to_device(self._numbers("position_ids", rank), device)

    def padding(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return whether each of a rank's tokens is padding, (T_local,) bool."""
        return self.token_indices(rank, device) >= self.tokens - self._padding

    def shard(self, x: Tensor, rank: int, dim: int = 0, value: float = 0) -> Tensor:
        """Return a rank's tokens of a packed tensor: (T, …) -> (T_local, …) along `dim`.

        The result is a copy, which is made without communication. `shard` is differentiable, and
        the gradient reaches only this rank's tokens of `x`. If the layout has padding, `x` need not
        contain the padding. If `x` does not contain it, the padding in the result is filled with
        `value`, which should be −100 for labels.
        """
        check_tensor("x", x)
        held = self.token_indices(rank, x.device)
        return shard(x, held, dim, self.tokens, self.tokens - self._padding, value)

    @outside_graphs
    def unshard(self, x_local: Tensor, group: Group, dim: int = 0) -> Tensor:
        """Return the packed tensor on every rank, given each rank's tokens: (T_local, …) -> (T, …).

        Every rank must call `unshard`. Backward adds the gradients of all ranks, in rank order, on
        the rank that holds the token. Each rank sends (P − 1)·T_local rows in forward, and the
        gradients of T − T_local rows in backward. Padding is at the end of the result.
        """
        return unshard(x_local, self.geometry, group, dim)

    @outside_graphs
    def remap(self, x_local: Tensor, to: Layout, group: Group, dim: int = 0) -> Tensor:
        """Return this rank's tokens in layout `to`: (T_local, …) -> (T_local of `to`, …).

        Only tokens whose rank changes are sent. They are sent directly to their new rank. Gradients
        are sent in the reverse direction. `to.remap(…, to=self)` restores every bit.

        Raise a ValueError unless both layouts have the same documents and ranks.
        """
        if not isinstance(to, Layout):
            raise ValueError(f"to must be a seqpar.Layout, got {type(to).__name__}")
        return remap(x_local, self.geometry, to.geometry, group, dim)

    @outside_graphs
    def chunked(self, size: int) -> Layout:
        """Return a layout in which each document is cut into documents of `size` tokens.

        Every rank holds the same tokens in the same order as before, so attention takes the same q,
        k and v. With the returned layout, no query attends to a key outside the query's chunk. The
        last chunk of a document may be shorter. `position_ids` of the result count from the start
        of the chunk. The result is cached in this layout.
        """
        size = min(as_int("size", size, 1), MAX_DOCUMENT_TOKENS)
        if self.geometry.cut.most_documents:
            raise ValueError(
                "layout must have no most_documents: the number of chunks depends on the documents"
            )

        def build() -> Layout:
            cu, cut = self.geometry.cu_seqlens, self.geometry.cut
            chunks = cut_into_fixed_chunks(cu, size)
            return Layout(chunks, FixedChunks(cut, cu, size), self._padding)

        return self.geometry.derived(("chunked", size, self._padding), build)

    @outside_graphs
    def plot(self, path: str | Path) -> None:
        """Draw which rank holds which token, and each rank's causal work, into the file `path`.

        `seqpar.layout.plot.plot_layouts({name: layout}, path)` compares several layouts in one
        picture. Requires matplotlib.
        """
        plot_layouts({"": self}, path)

    @outside_graphs
    def prepare(self, attn: Prepares, **call: object) -> Layout:
        """Compute ahead of time what the first attention call with this layout needs. Return the
        layout.

        The first call with a layout computes tables, such as the indices of the rows that ranks
        send. `prepare` computes them earlier, for example in a DataLoader. `attn` is the attention
        module. The keyword arguments describe the call, as in `layout.prepare(attn, heads=32,
        kv_heads=8, head_dim=128, dtype=torch.bfloat16, causal=True)`. `attn.preparation` lists
        them. Call `prepare` once for each combination of arguments with which `attn` will be
        called.

        A pickled layout includes these tables, so a different process can prepare the layout. If
        FlashAttention-4 is installed and the process uses a GPU, `prepare` also compiles the
        kernels of FlashAttention-4 for these calls.

        Raise a ValueError that names a wrong argument.
        """
        if not hasattr(attn, "preparation"):
            raise ValueError(f"attn must be an attention module, got {shown(attn)}")
        attn.preparation(**call)(self)
        return self

    @outside_graphs
    def load_tables(self, other: Layout) -> None:
        """Make this layout's calls on GPUs compute the documents of another layout.

        The other layout must have the same ranks, tokens and `most_documents`. All calls on GPUs
        that this process has made with this layout have tables on the GPU. The tables of the other
        layout are copied over these tables, in the current stream. After `load_tables`, repetitions
        of these calls compute the documents of the other layout. CUDA graphs of these calls,
        replayed in this stream, also compute the documents of the other layout.

        After `load_tables`, this layout refuses calls of a new kind, such as a call with a
        different mask, or the first call with a backward. The attributes of this layout do not
        change. To return to the documents of this layout, load a new layout with these documents.
        To build the tables of the other layout ahead of time, call its method `prepare`. Position
        ids and other inputs of a graph must be copied by the user.

        Raise a ValueError if the other layout does not have the same ranks, tokens and
        `most_documents`, or if this layout has had no call on a GPU.
        """
        if not isinstance(other, Layout):
            raise ValueError(f"other must be a seqpar.Layout, got {type(other).__name__}")
        if not self.geometry.cut.most_documents:
            raise ValueError("layout must have most_documents, so that other tables fit")
        expected, actual = (
            f"{x.geometry.cut.most_documents} documents, {x.ranks} ranks and {x.tokens} tokens"
            for x in (self, other)
        )
        if actual != expected:
            raise ValueError(f"other must have {expected}, padding included, got {actual}")
        if other.geometry is self.geometry:
            raise ValueError(
                "other must be a different layout: make a new one, even for the same documents"
            )
        load_tables(self.geometry, other.geometry)

    def pin_memory(self) -> Layout:
        """Copy tables that came from another process to pinned memory, and return this layout.

        `DataLoader(pin_memory=True)` calls this method in a separate thread, so that the first call
        of attention need not copy the tables on the host.
        """
        if self._packed is not None:
            pin(*self._packed)
        return self

    def _with_tables(self) -> Layout:
        self._takes_tables = True
        return self

    @classmethod
    def _with_packed(
        cls, cu_seqlens: Ints, cut: LayoutCut, padding: int, data: bytes, *packed: Any
    ) -> Layout:
        layout = cls(cu_seqlens, cut, padding)
        unpack(layout.geometry, data, *packed)
        layout._packed = packed
        return layout._with_tables()

    def _numbers(self, name: str, rank: int) -> Tensor:
        rank = self._rank(rank)
        if not is_traced():
            # Under a FakeTensorMode, the operator would refuse `_handle`, which is no fake tensor.
            return handle.read_indices(name, self.geometry, rank)
        return getattr(torch.ops.seqpar, name)(self._handle, rank, self.tokens_on(rank))

    @property
    def _padding(self) -> int:
        return handle.sizes_of(self._sizes[0]).padding

    def _tokens_on(self, ranks: slice) -> int:
        """Return the number of tokens on these ranks. torch.compile can trace this method, because
        it reads only the shapes of `_sizes`.
        """
        if not is_traced():
            return sum(self.tokens_per_rank[ranks])
        edges = (self._sizes[min(edge, self.ranks)] for edge in (ranks.start, ranks.stop))
        first, behind = (handle.sizes_of(sizes).tokens_before for sizes in edges)
        return behind - first

    def _rank(self, rank: int) -> int:
        if (number := as_int("rank", rank, 0)) >= self.ranks:
            raise ValueError(
                f"rank must be below the layout's {self.ranks} ranks, got {shown(number)}"
            )
        return number
