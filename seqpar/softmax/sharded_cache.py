"""`ShardedCache`, which distributes keys and values over ranks for decoding.

`CacheRows` tracks which rows hold which tokens on all ranks, and `CacheLayer` contains the tensors
of one layer on this rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import check_layouts
from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    Ints,
    as_int,
    as_sequence,
    check_tensor,
    parse_window,
    shown,
)
from seqpar.core.compiling import outside_graphs
from seqpar.core.memo import Memo
from seqpar.layout.layout import Layout
from seqpar.softmax.decode import refuse_gradients, unknown_layer
from seqpar.softmax.module import Attention


class CacheRows:
    """The tokens of each sequence on each rank, and the rows that store these tokens.

    Each rank has a range of rows for each of N sequences, in the order of the sequences. The first
    rows of a range store tokens. The other rows of the range are free, so that a sequence can grow
    without moving other sequences. P is the number of ranks.
    """

    def __init__(self, layout: Layout, free_rows: int) -> None:
        self.lengths = np.diff(layout.cu_seqlens)  # (N,)
        self._spans: list[list[list[tuple[int, int]]]] = []
        for rank in range(layout.ranks):
            rank_spans: list[list[tuple[int, int]]] = [[] for _ in range(self.lengths.size)]
            for document, start, stop in layout.spans(rank):
                rank_spans[document].append((start, stop))
            self._spans.append(rank_spans)
        # (P, N): the number of tokens of each sequence on each rank
        self.held = self._count_tokens()
        # (P, N): the number of rows for each sequence on each rank
        self.capacities = self.held + free_rows

    def extend(self, owner: int, tokens: int, min_growth: int) -> None:
        """Assign rows on the rank `owner` to `tokens` new tokens of each sequence.

        If the rank has too few rows, each sequence gets free rows for at least an eighth of its
        tokens, and for at least `min_growth` tokens.
        """
        for spans, length in zip(self._spans[owner], self.lengths.tolist(), strict=True):
            start = spans.pop()[0] if spans and spans[-1][1] == length else length
            spans.append((start, length + tokens))
        self.lengths = self.lengths + tokens
        self.held[owner] += tokens
        held = self.held[owner]
        if (held > self.capacities[owner]).any():
            grown = held + np.maximum(held // 8, min_growth)
            self.capacities[owner] = np.maximum(self.capacities[owner], grown)

    def drop_last(self, tokens: int) -> None:
        self.lengths = self.lengths - tokens
        for rank_spans in self._spans:
            for i, length in enumerate(self.lengths.tolist()):
                rank_spans[i] = [(a, min(b, length)) for a, b in rank_spans[i] if a < length]
        self.held = self._count_tokens()

    def drop_first(self, kept: int, free_rows: int) -> Ints:
        """Drop all tokens of each sequence except the last `kept`, and set the number of free rows.

        Return how many tokens of each sequence each rank has dropped, (P, N).
        """
        dropped, before = np.maximum(self.lengths - kept, 0), self.held
        for rank_spans in self._spans:
            for i, first in enumerate(dropped.tolist()):
                spans = [(max(a - first, 0), b - first) for a, b in rank_spans[i] if b > first]
                rank_spans[i] = spans
        self.lengths, self.held = self.lengths - dropped, self._count_tokens()
        self.capacities = self.held + free_rows
        return before - self.held

    def select(self, sequences: list[int]) -> None:
        self.lengths = self.lengths[sequences]
        self._spans = [[list(rank_spans[i]) for i in sequences] for rank_spans in self._spans]
        self.held, self.capacities = self.held[:, sequences], self.capacities[:, sequences]

    def layout(self) -> Layout:
        spans = [
            [(i, start, stop) for i, spans in enumerate(rank_spans) for start, stop in spans]
            for rank_spans in self._spans
        ]
        return Layout.from_spans(spans, np.r_[0, self.lengths.cumsum()])

    def decode_layout(self, tokens: int, chunk: int | None = None) -> tuple[Layout, Ints]:
        """Return a layout of the rows on all ranks, and the cu_seqlens of the queries of a decoding
        step.

        The queries are the last `tokens` tokens of each sequence. With `chunk`, each document of
        the layout is a chunk of `chunk` tokens of a sequence (`Layout.chunked`).
        """
        layout = self._layout_of_rows()
        ends = layout.cu_seqlens[1::2]
        if chunk is not None:
            layout = layout.chunked(chunk)
        queries = (ends[:, None] + np.arange(-tokens, 0)).ravel()
        edges = layout.cu_seqlens
        documents = np.searchsorted(edges, queries, "right") - 1
        counts = np.bincount(documents, minlength=edges.size - 1)
        return layout, np.r_[0, counts.cumsum()]

    def _layout_of_rows(self) -> Layout:
        """Return a layout of the rows of each rank, up to the row of the rank's last token.

        The tokens of sequence i are document 2i of the layout. The free rows after sequence i are
        document 2i + 1, which has no queries.
        """
        empty = (self.capacities - self.held)[:, :-1]  # without the free rows of the last sequence
        starts = np.cumsum(empty, 0) - empty
        lengths = np.zeros(2 * self.lengths.size - 1, np.int64)
        lengths[::2], lengths[1::2] = self.lengths, empty.sum(0)
        spans = []
        stops = starts + empty
        for rank, rank_spans in enumerate(self._spans):
            tokens = [(2 * i, *span) for i, parts in enumerate(rank_spans) for span in parts]
            gaps = zip(starts[rank].tolist(), stops[rank].tolist(), strict=True)
            spans.append(tokens + [(2 * i + 1, *gap) for i, gap in enumerate(gaps)])
        return Layout.from_spans(spans, np.r_[0, lengths.cumsum()])

    def rows_in_use(self, rank: int) -> int:
        return int(self.capacities[rank, :-1].sum() + self.held[rank, -1])

    def last_rows(self, rank: int, tokens: int) -> Tensor:
        """Return the rows of the last `tokens` tokens of each sequence on a rank, (N·tokens,)."""
        ends = np.cumsum(self.capacities[rank]) - self.capacities[rank] + self.held[rank]
        return torch.from_numpy((ends[:, None] - np.arange(tokens, 0, -1)).ravel())

    def _count_tokens(self) -> Ints:
        counts = [
            [sum(stop - start for start, stop in spans) for spans in rank_spans]
            for rank_spans in self._spans
        ]
        return np.array(counts, np.int64).reshape(len(self._spans), -1)


@dataclass
class CacheLayer:
    k: Tensor
    v: Tensor
    capacities: Ints  # (N,): the number of rows for each sequence
    length: int  # tokens of the longest sequence, after the last step in which this layer attended
    # False while k and v are the user's tensors from `put`, to which the cache never writes.
    owns_memory: bool

    def rearrange(
        self, held: Ints, capacities: Ints, sequences: Sequence[int] | None, dropped: Ints | None
    ) -> None:
        """Copy the rows of some sequences to new memory.

        Args:
            held: (M,). The number of rows to copy for each of the M sequences that are kept.
            capacities: (M,). The number of rows that each of the M sequences has in the new memory.
            sequences: the indices of the M sequences, in the new order. None keeps all sequences.
            dropped: (N,). The number of rows that are not copied at the start of each of the N old
                sequences. None copies all rows.
        """
        kept = range(held.size) if sequences is None else sequences
        starts, ends = np.cumsum(self.capacities) - self.capacities, np.cumsum(capacities)
        if dropped is not None:
            starts = starts + dropped

        def rearranged(x: Tensor) -> Tensor:
            # A tensor that was made in inference mode cannot be written to outside inference mode.
            with torch.inference_mode(False), torch.no_grad():
                copy = x.new_empty((*x.shape[:-3], int(ends[-1]), *x.shape[-2:]))
                for i, end, capacity, rows in zip(kept, ends, capacities, held, strict=True):
                    source = x.narrow(-3, int(starts[i]), int(rows))
                    copy.narrow(-3, int(end - capacity), int(rows)).copy_(source)
            return copy

        self.k, self.v = rearranged(self.k), rearranged(self.v)
        self.capacities, self.owns_memory = capacities, True


SPARE = 64  # tokens that are kept in addition to a window, so that `truncate` can drop some steps


class ShardedCache:
    """The keys and values of a model's layers, distributed over ranks, for inference.

    `put` stores the keys and values that a rank computed in the prefill. For each step, call
    `extend`, which makes the sequences longer. Then call `attend` in each layer, with queries, keys
    and values that all ranks have. The rank that owns the new tokens stores their keys and values,
    and `attn.decode` computes attention. A step sends the same bytes as `Attention.decode`, however
    long the sequences are.

    The rank with the fewest tokens stores new tokens. When it has stored `block` new tokens of each
    sequence, the rank that has the fewest tokens at this time stores the next new tokens. All ranks
    must make the same calls. Decoding has no gradients.

    Args:
        attn: the module whose ranks hold the cache.
        layout: the layout of the prefill. Its N documents are the sequences, of any lengths. If the
            tensors have a batch dimension, each batch entry has N sequences.
        block: the number of new tokens of each sequence that a rank stores before the cache chooses
            the rank for the next new tokens.
        reserve: the number of new tokens of each sequence for which memory is allocated at first.
            When a layer's memory is full, it grows by an eighth, and its rows are copied.
        window: the largest number of keys before its own position to which a query attends, in all
            layers. None is unlimited. With a window, older keys are dropped. All ranks together
            then keep at most 2 · (window + 64) tokens of a sequence, and the tokens of one step.
            `length` and `layout` count only the tokens that are kept.

    Raises:
        ValueError: if an argument of the constructor or of a method is wrong. The error names the
            argument, and is raised before anything is sent or stored.
    """

    @outside_graphs
    def __init__(
        self,
        attn: Attention,
        layout: Layout,
        *,
        block: int = 64,
        reserve: int = 0,
        window: int | None = None,
    ) -> None:
        if not isinstance(attn, Attention):
            raise ValueError(f"attn must be an attention module, got {shown(attn)}")
        check_layouts(layout=layout)
        if layout.ranks != attn.ranks:
            expected = f"the module's {attn.ranks} ranks"
            raise ValueError(f"layout must be for {expected}, got one for {layout.ranks}")
        if not layout.documents:
            raise ValueError("layout must have a document for each sequence, got none")
        self.attn = attn
        self._block = as_int("block", block, 1, MAX_DOCUMENT_TOKENS)
        reserve = -(-as_int("reserve", reserve, 0, MAX_DOCUMENT_TOKENS) // attn.ranks)
        self._window = None if window is None else as_int("window", window, 0)
        # whether the first tokens of each sequence were dropped
        self._dropped_first = np.zeros(layout.documents, bool)
        self._rows = CacheRows(layout, reserve + self._block if reserve else 0)
        self._layers: dict[Hashable, CacheLayer] = {}
        self._owner = 0  # the rank that stores the new tokens
        self._tokens_until_next_owner = 0
        self._step_tokens = 0
        # layouts and tables that follow from the rows; replaced when the rows change
        self._derived = Memo()

    @property
    def layout(self) -> Layout:
        """The tokens that each rank holds now. Each sequence is a document."""
        return self._derived("layout", self._rows.layout)

    @property
    def length(self) -> int:
        """The number of tokens of the longest sequence."""
        return int(self._rows.lengths.max())

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        return self._rows.lengths.size

    @property
    def rows(self) -> int:
        """The number of rows of this rank's tensors, up to the row of its last token."""
        return self._rows.rows_in_use(self.attn.rank)

    @property
    def droppable(self) -> int:
        """How many of the last tokens of each sequence `truncate` can drop."""
        needed = np.where(self._dropped_first, self._window or 0, 0)
        return int((self._rows.lengths - needed).min())

    @outside_graphs
    def put(self, layer: Hashable, k: Tensor, v: Tensor) -> None:
        """Store this rank's keys and values of a layer's prefill.

        k is (T_local, Hkv, D) and v is (T_local, Hkv, Dv), in the layout's local order. Both may
        have a leading batch dimension. If the cache was made with `reserve=0`, it uses k and v
        themselves until its memory must grow, and never writes to them. In all other cases, k and v
        are copied.
        """
        rank = self.attn.rank
        held = self._rows.held[rank]
        rows = int(held.sum())
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
            if x.dim() not in (3, 4) or x.shape[-3] != rows:
                expected = f"the {rows} tokens of this rank, (…, {rows}, Hkv, D)"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
        stored = CacheLayer(k.detach(), v.detach(), held.copy(), self.length, owns_memory=False)
        self._layers[layer] = stored
        if not np.array_equal(held, self._rows.capacities[rank]):
            self._rearrange(stored, held)

    @outside_graphs
    def extend(self, tokens: int = 1) -> None:
        """Begin a step in which each sequence gets `tokens` more tokens."""
        new = as_int("tokens", tokens, 1, MAX_DOCUMENT_TOKENS - self.length)
        self._drop_old_tokens()
        if self._tokens_until_next_owner <= 0:
            self._owner = int(self._rows.held.sum(1).argmin())
            self._tokens_until_next_owner = self._block
        self._rows.extend(self._owner, new, self._block)
        self._tokens_until_next_owner -= new
        self._step_tokens = new
        self._derived = Memo()

    @outside_graphs
    def truncate(self, length: int) -> None:
        """Drop the last tokens of each sequence, such as rejected proposals.

        Each sequence loses the same number of tokens, so that the longest sequence has `length`
        tokens. If the cache has dropped old tokens because of `window`, at most `droppable` tokens
        of each sequence can be dropped.
        """
        shortest = self.length - self.droppable
        length = as_int("length", length, shortest, self.length)
        self._rows.drop_last(self.length - length)
        self._tokens_until_next_owner = min(self._tokens_until_next_owner, 0)
        self._step_tokens = 0
        for stored in self._layers.values():
            stored.length = min(stored.length, length)
        self._derived = Memo()

    @outside_graphs
    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order, and drop all other sequences.

        For example, keep the beams that continue. A sequence may occur several times. Each rank
        copies its own rows, and nothing is sent.
        """
        last = self.sequences - 1
        numbers = as_sequence("sequences", sequences, "integers")
        kept = [as_int(f"sequences[{i}]", x, 0, last) for i, x in enumerate(numbers)]
        if not kept:
            raise ValueError("sequences must have at least one number, got none")
        if any(stored.length < self.length for stored in self._layers.values()):
            raise ValueError("sequences must be selected after all layers attended in a step")
        self._step_tokens, before = 0, self.length
        if kept == list(range(last + 1)):
            return
        held = self._rows.held[self.attn.rank]
        for stored in self._layers.values():
            stored.rearrange(held[kept], stored.capacities[kept], kept, None)
        self._rows.select(kept)
        self._dropped_first = self._dropped_first[kept]
        for stored in self._layers.values():
            stored.length += self.length - before
        self._derived = Memo()

    @outside_graphs
    def attend(
        self,
        layer: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        chunk: int | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Store the step's keys and values, and return attention of the step's queries over all
        keys.

        q (N·T, Hq, D), k (N·T, Hkv, D) and v (N·T, Hkv, Dv) must be the same on all ranks. They may
        have a leading batch dimension. They contain the T tokens of the step for each sequence, in
        the order of the sequences. Options, results and bytes sent are as in `Attention.decode`.
        With `chunk`, queries attend only to keys in the same chunk of `chunk` tokens, as in
        `Layout.chunked`.
        """
        self._check_options(chunk, options)
        refuse_gradients(q=q, k=k, v=v)
        stored = self._layer_in_step(layer)
        self._check(stored, q=q)
        before = stored.length
        rows = self.append(layer, k, v)
        try:
            return self.decode(q, *rows, chunk=chunk, **options)
        except (ValueError, TypeError):
            stored.length = before  # undoes the step, so that the caller can try again
            raise

    @outside_graphs
    def append(self, layer: Hashable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values, and return this rank's k and v for `decode`.

        k and v are returned as views of the layer's memory, (…, rows, Hkv, D or Dv). Some rows may
        be free, and have arbitrary values.
        """
        stored, rank = self._layer_in_step(layer), self.attn.rank
        self._check(stored, k=k, v=v)
        for name, x, kept in (("k", k, stored.k), ("v", v, stored.v)):
            shapes = [(*y.shape[:-3], *y.shape[-2:]) for y in (x, kept)]
            if shapes[0] != shapes[1] or x.dtype != kept.dtype or x.device != kept.device:
                expected = f"{tuple(kept.shape)} of {kept.dtype} on {kept.device}"
                actual = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
                raise ValueError(f"{name} must be like the cache's, {expected}, got {actual}")
        is_owner, capacities = self._owner == rank, self._rows.capacities[rank]
        needs_copy = is_owner and not stored.owns_memory
        if needs_copy or not np.array_equal(stored.capacities, capacities):
            self._rearrange(stored, self._rows.held[rank] - self._step_tokens * is_owner)
        if is_owner:
            build = lambda: self._rows.last_rows(rank, self._step_tokens).to(k.device)  # noqa: E731
            rows = self._derived(("rows", k.device), build)
            for whole, x in ((stored.k, k), (stored.v, v)):
                whole.index_copy_(whole.dim() - 3, rows, x.detach())
        stored.length = self.length
        return stored.k.narrow(-3, 0, self.rows), stored.v.narrow(-3, 0, self.rows)

    @outside_graphs
    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        chunk: int | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return attention of the queries of a decoding step over the k and v that `append`
        returned.

        k and v may also be tensors that were computed row by row from the tensors that `append`
        returned. DeepSeek-V2, for example, computes keys from latents. `attend` describes the
        options.
        """
        self._check_options(chunk, options)
        build = lambda: self._rows.decode_layout(self._step_tokens, chunk)  # noqa: E731
        layout, cu_seqlens = self._derived(("call", chunk), build)
        return self.attn.decode(q, k, v, layout, cu_seqlens=cu_seqlens, **options)

    def _layer_in_step(self, layer: Hashable) -> CacheLayer:
        """Return a layer that can take part in the current step.

        Raise a ValueError if the layer is unknown, if no step has begun, or if the layer has left
        out a step.
        """
        stored = self._layers.get(layer)
        if stored is None:
            raise unknown_layer(layer, self._layers)
        if not self._step_tokens or stored.length < self.length - self._step_tokens:
            expected = "must attend once in each step of extend"
            progress = f"has {stored.length} of {self.length} tokens"
            raise ValueError(f"layer {layer!r} {expected}: it {progress}")
        return stored

    def _drop_old_tokens(self) -> None:
        """Drop old tokens if the longest sequence has more than 2 · (`window` + `SPARE`) tokens.

        After this, the cache stores the last `window` + `SPARE` tokens of each sequence.
        """
        if self._window is None or self.length <= 2 * (self._window + SPARE):
            return
        if any(stored.length < self.length for stored in self._layers.values()):
            return  # `attend` will refuse the layer that left out a step
        kept, rank = self._window + SPARE, self.attn.rank
        self._dropped_first |= self._rows.lengths > kept
        dropped = self._rows.drop_first(kept, self._block)[rank]
        held = self._rows.held[rank]
        for stored in self._layers.values():
            self._rearrange(stored, held, dropped=dropped)
            stored.length = self.length

    def _check_options(self, chunk: int | None, options: dict[str, Any]) -> None:
        if self._window is not None:
            left, _ = parse_window(options.get("window_size", (-1, -1)))
            refused = {"chunk": chunk} | {x: options.get(x) for x in ("mask", "prefix_lens")}
            for name, given in refused.items():
                if given is not None:
                    raise ValueError(f"{name} must be None in a cache with a window")
            if not 0 <= left <= self._window:
                expected = f"at most the cache's window, {self._window} keys before a query"
                found = "no limit (-1)" if left == -1 else left
                raise ValueError(f"window_size must be {expected}, got {found}")
        if chunk is not None:
            as_int("chunk", chunk, 1)
        for name in ("mask", "prefix_lens"):
            if (self.sequences > 1 or chunk) and options.get(name) is not None:
                raise ValueError(f"{name} must be None with a chunk or several sequences")

    def _rearrange(self, stored: CacheLayer, held: Ints, dropped: Ints | None = None) -> None:
        stored.rearrange(held, self._rows.capacities[self.attn.rank].copy(), None, dropped)

    def _check(self, stored: CacheLayer, **operands: Tensor) -> None:
        for name, x in operands.items():
            check_tensor(name, x)
            new = self.sequences * self._step_tokens
            if x.dim() != stored.k.dim() or x.shape[-3] != new:
                expected = f"{stored.k.dim()} dimensions and the step's {new} tokens"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
