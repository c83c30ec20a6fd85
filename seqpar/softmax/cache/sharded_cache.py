"""A cache of keys and values that stays where a sharded prefill left it, and grows by decoding."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from seqpar.attention.operands import check_layouts
from seqpar.core.arguments import MAX_DOCUMENT_TOKENS, Ints, as_int, check_tensor, shown
from seqpar.core.memo import Memo
from seqpar.layout.layout import Layout
from seqpar.softmax.cache.cache_rows import CacheLayer, CacheRows
from seqpar.softmax.decode import refuse_gradients
from seqpar.softmax.module import Attention

SPARE = 64  # tokens that are kept before a window, of which steps may be dropped again


class ShardedCache:
    """The keys and values of a model's layers, spread over ranks.

    `put` keeps what a rank computed in the prefill. In a step, `extend` says that the sequences
    grow, and `attend` calls `attn.decode` in each layer, with queries, keys and values that all
    ranks have; the rank that the new tokens go to stores their keys and values. Nothing else moves:
    a step sends what `Attention.decode` does, however long the sequences are.

    A new block of tokens goes to the rank that has the fewest, and so do those that follow, until
    the rank got `block` of them: with short turns its tokens would be in many spans. All ranks make
    the same calls. For inference: there are no gradients.

    Args:
        attn: the module whose ranks have the cache.
        layout: of the prefill. Its N documents are sequences, as long as they like; with a batch in
            front of the tensors, there are N for each of its rows.
        block: how many tokens of a sequence a rank gets before another one may.
        reserve: for how many new tokens of each sequence memory is set aside at once. Beyond them a
            layer's memory grows by an eighth where it is full, for which its rows are copied.
        window: how many keys before it a query sees at most, in all layers; None: all. Then older
            keys are dropped: of each sequence at most 2 · (window + 64) tokens and a step are kept,
            over all ranks, and `length` and `layout` are of these.

    Raises:
        ValueError: if an argument is wrong, here and in all calls; it names the argument, and is
            raised before anything is sent or stored.
    """

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
        self._forgot = np.zeros(layout.documents, bool)  # whether the first tokens were dropped
        self._rows = CacheRows(layout, reserve + self._block if reserve else 0)
        self._layers: dict[Hashable, CacheLayer] = {}
        self._owner, self._left = 0, 0  # who gets new tokens, and how many more
        self._new = 0  # tokens of the step
        self._derived = Memo()  # what follows from the rows as they are now

    @property
    def layout(self) -> Layout:
        """Which tokens each rank has now; each sequence is a document."""
        return self._derived("layout", self._rows.layout)

    @property
    def length(self) -> int:
        """How many tokens the longest sequence has."""
        return int(self._rows.lengths.max())

    @property
    def sequences(self) -> int:
        """N: how many sequences there are."""
        return self._rows.lengths.size

    @property
    def rows(self) -> int:
        """How many rows this rank's tensors have, up to its last token."""
        return self._rows.used(self.attn.rank)

    @property
    def droppable(self) -> int:
        """How many of the last tokens of each sequence `truncate` can drop."""
        needed = np.where(self._forgot, self._window or 0, 0)
        return int((self._rows.lengths - needed).min())

    def put(self, layer: Hashable, k: Tensor, v: Tensor) -> None:
        """Keep what this rank has of a layer's prefill.

        k is (T_local, Hkv, D), v (T_local, Hkv, Dv), or with the batch in front, in the layout's
        local order. With `reserve` they are copied, else kept until the memory must grow.
        """
        rank = self.attn.rank
        held = self._rows.held[rank]
        rows = int(held.sum())
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
            if x.dim() not in (3, 4) or x.shape[-3] != rows:
                expected = f"the {rows} tokens of this rank, (…, {rows}, Hkv, D)"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
        stored = CacheLayer(k.detach(), v.detach(), held.copy(), self.length, ours=False)
        self._layers[layer] = stored
        if not np.array_equal(held, self._rows.rooms[rank]):
            self._rearrange(stored, held)

    def extend(self, tokens: int = 1) -> None:
        """Begin a step: each sequence has so many tokens more, whose keys `attend` brings."""
        new = as_int("tokens", tokens, 1, MAX_DOCUMENT_TOKENS - self.length)
        self._forget()
        if self._left <= 0:
            self._owner = int(self._rows.held.sum(1).argmin())
            self._left = self._block
        self._rows.extend(self._owner, new, self._block)
        self._left, self._new = self._left - new, new
        self._derived = Memo()

    def truncate(self, length: int) -> None:
        """Drop the last tokens of each sequence, such as proposed ones that were not accepted.

        It drops as many of each as leave the longest one with `length`. Where keys before a window
        were dropped, those of the window must be left.
        """
        shortest = self.length - self.droppable
        length = as_int("length", length, shortest, self.length)
        self._rows.truncate(self.length - length)
        self._left, self._new = min(self._left, 0), 0
        for stored in self._layers.values():
            stored.length = min(stored.length, length)
        self._derived = Memo()

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, in this order, such as the beams that go on.

        One may be there several times. Each rank copies its own rows, and sends nothing.
        """
        last = self.sequences - 1
        kept = [as_int("sequences", i, 0, last) for i in sequences]
        if not kept:
            raise ValueError("sequences must have at least one")
        if any(stored.length < self.length for stored in self._layers.values()):
            raise ValueError("sequences must be selected behind a step, where all layers attended")
        self._new, before = 0, self.length
        if kept == list(range(last + 1)):
            return
        held = self._rows.held[self.attn.rank]
        for stored in self._layers.values():
            self._rearrange(stored, held[kept], kept, stored.rooms[kept])
        self._rows.select(kept)
        self._forgot = self._forgot[kept]
        for stored in self._layers.values():
            stored.length += self.length - before
        self._derived = Memo()

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
        """Store the step's keys and values, and return attention of its queries over all keys.

        All ranks have the same q (N·T, Hq, D), k (N·T, Hkv, D) and v (N·T, Hkv, Dv), or with the
        batch in front: the T tokens of the step of each of the N sequences, which follow one
        another. The options, the result and the bytes sent are those of `Attention.decode`.
        With `chunk` queries see keys of their own chunk of so many tokens alone, as in
        `Layout.chunked`.
        """
        self._check_options(chunk, options)
        refuse_gradients(q=q, k=k, v=v)
        stored = self._begun(layer)
        self._check(stored, q=q)
        before = stored.length
        rows = self.append(layer, k, v)
        try:
            return self.decode(q, *rows, chunk=chunk, **options)
        except (ValueError, TypeError):
            stored.length = before  # the layer has not attended
            raise

    def append(self, layer: Hashable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values; return all rows that this rank has, for `decode`.

        They are views of the layer's memory, (…, rows, Hkv, D and Dv). Some rows may have no token,
        and any number.
        """
        stored, rank = self._begun(layer), self.attn.rank
        self._check(stored, k=k, v=v)
        for name, x, kept in (("k", k, stored.k), ("v", v, stored.v)):
            shapes = [(*y.shape[:-3], *y.shape[-2:]) for y in (x, kept)]
            if shapes[0] != shapes[1] or x.dtype != kept.dtype or x.device != kept.device:
                expected = f"{tuple(kept.shape)} of {kept.dtype} on {kept.device}"
                found = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
                raise ValueError(f"{name} must be like the cache's, {expected}, got {found}")
        ours, rooms = self._owner == rank, self._rows.rooms[rank]
        if (ours and not stored.ours) or not np.array_equal(stored.rooms, rooms):
            self._rearrange(stored, self._rows.held[rank] - self._new * ours)
        if ours:
            rows = self._derived(
                ("rows", k.device), lambda: self._rows.last(rank, self._new).to(k.device)
            )
            for whole, x in ((stored.k, k), (stored.v, v)):
                whole.index_copy_(whole.dim() - 3, rows, x.detach())
        stored.length = self.length
        return stored.k.narrow(-3, 0, self.rows), stored.v.narrow(-3, 0, self.rows)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, chunk: int | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Return attention of the step's queries, as `attend` does, over what `append` returned.

        k and v may also be made of that, row by row, as keys are of the latents of DeepSeek-V2.
        """
        self._check_options(chunk, options)
        layout, cu_seqlens = self._derived(
            ("call", chunk), lambda: self._rows.of_call(self._new, chunk)
        )
        return self.attn.decode(q, k, v, layout, cu_seqlens=cu_seqlens, **options)

    def _begun(self, layer: Hashable) -> CacheLayer:
        """Return a layer in a step; raise a ValueError if there is none, or it left one out."""
        stored = self._layers.get(layer)
        if stored is None:
            raise ValueError(f"layer must be one that was put, {list(self._layers)}, got {layer!r}")
        if not self._new or stored.length < self.length - self._new:
            behind = f"has {stored.length} of {self.length} tokens"
            raise ValueError(
                f"layer {layer!r} must attend once in each step of extend: it {behind}"
            )
        return stored

    def _forget(self) -> None:
        """Drop keys that no query sees any more, if there are many of them."""
        if self._window is None or self.length <= 2 * (self._window + SPARE):
            return
        if any(stored.length < self.length for stored in self._layers.values()):
            return  # which is refused when it attends
        kept, rank = self._window + SPARE, self.attn.rank
        self._forgot |= self._rows.lengths > kept
        dropped = self._rows.forget(kept, self._block)[rank]
        held = self._rows.held[rank]
        for stored in self._layers.values():
            self._rearrange(stored, held, dropped=dropped)
            stored.length = self.length

    def _check_options(self, chunk: int | None, options: dict[str, Any]) -> None:
        if self._window is not None:
            left = options.get("window_size", (-1, -1))[0]
            if chunk is not None or options.get("mask") is not None:
                raise ValueError("chunk and mask must be None in a cache with a window")
            if not 0 <= left <= self._window:
                expected = f"one of at most the cache's {self._window} keys before a query"
                raise ValueError(f"window_size must be {expected}, got {left}")
        if chunk is not None:
            as_int("chunk", chunk, 1)
        for name in ("mask", "prefix_lens"):
            if (self.sequences > 1 or chunk) and options.get(name) is not None:
                raise ValueError(f"{name} must be None with a chunk or several sequences")

    def _rearrange(
        self,
        stored: CacheLayer,
        held: Ints,
        sequences: Sequence[int] | None = None,
        rooms: Ints | None = None,
        dropped: Ints | None = None,
    ) -> None:
        """Give a layer memory of its own with this room for its sequences."""
        rooms = self._rows.rooms[self.attn.rank].copy() if rooms is None else rooms
        stored.rearrange(held, rooms, sequences, dropped)

    def _check(self, stored: CacheLayer, **operands: Tensor) -> None:
        for name, x in operands.items():
            check_tensor(name, x)
            new = self.sequences * self._new
            if x.dim() != stored.k.dim() or x.shape[-3] != new:
                expected = f"{stored.k.dim()} dimensions, and {new} tokens, the step's"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
