"""A cache of keys and values that stays where a sharded prefill left it, and grows by decoding."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.arguments import LONGEST_DOCUMENT, as_int, check_tensor, shown
from seqpar.layout.layout import Layout
from seqpar.operands import check_layouts
from seqpar.softmax.decode import refuse_gradients
from seqpar.softmax.module import Attention


@dataclass
class _Layer:
    """A layer's keys and values on this rank: the first rows of k and v, (…, capacity, Hkv, D)."""

    k: Tensor
    v: Tensor
    length: int  # of the sequence, as far as the layer has come
    ours: bool  # whether k and v may be written to: those that were put are the model's


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
        layout: of the prefill, with one document: that of each sequence of a batch.
        block: how many tokens a rank gets before another one may.
        reserve: for how many new tokens memory is set aside at once. Beyond them a layer's memory
            grows by an eighth where it is full, for which its rows are copied.

    Raises:
        ValueError: if an argument is wrong, here and in all calls; it names the argument, and is
            raised before anything is sent or stored.
    """

    def __init__(
        self, attn: Attention, layout: Layout, *, block: int = 64, reserve: int = 0
    ) -> None:
        if not isinstance(attn, Attention):
            raise ValueError(f"attn must be an attention module, got {shown(attn)}")
        check_layouts(layout=layout)
        if layout.ranks != attn.ranks:
            expected = f"the module's {attn.ranks} ranks"
            raise ValueError(f"layout must be for {expected}, got one for {layout.ranks}")
        if layout.documents != 1:
            expected = "one document, that of each sequence, without padding"
            raise ValueError(f"layout must have {expected}, got {layout.documents}")
        self.attn, self._layout = attn, layout
        self._block = as_int("block", block, 1)
        self._reserve = -(-as_int("reserve", reserve, 0) // attn.ranks)
        self._layers: dict[Hashable, _Layer] = {}
        self._owner, self._left = 0, 0  # who gets new tokens, and how many more
        self._new = 0  # tokens of the step

    @property
    def layout(self) -> Layout:
        """Which tokens each rank has now."""
        return self._layout

    @property
    def length(self) -> int:
        """How many tokens each sequence has."""
        return self._layout.tokens

    def put(self, layer: Hashable, k: Tensor, v: Tensor) -> None:
        """Keep what this rank has of a layer's prefill.

        k is (T_local, Hkv, D), v (T_local, Hkv, Dv), or with the batch in front, in the layout's
        local order. With `reserve` they are copied, else kept until the memory must grow.
        """
        rows = self._layout.tokens_on(self.attn.rank)
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
            if x.dim() not in (3, 4) or x.shape[-3] != rows:
                expected = f"the {rows} tokens of this rank, (…, {rows}, Hkv, D)"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
        k, v = k.detach(), v.detach()
        if self._reserve:
            capacity = rows + self._reserve + self._block
            k, v = _grown(k, rows, capacity), _grown(v, rows, capacity)
        self._layers[layer] = _Layer(k, v, self.length, ours=self._reserve > 0)

    def extend(self, tokens: int = 1) -> None:
        """Begin a step: each sequence has so many tokens more, whose keys `attend` brings."""
        new = as_int("tokens", tokens, 1, LONGEST_DOCUMENT - self.length)
        owner, left = self._owner, self._left
        if left <= 0:
            counts = self._layout.tokens_per_rank
            owner, left = counts.index(min(counts)), self._block
        stop, spans = self.length + new, self._spans(self.length)
        spans[owner].append((0, self.length, stop))
        self._layout = Layout.from_spans(spans, stop)
        self._owner, self._left, self._new = owner, left - new, new

    def truncate(self, length: int) -> None:
        """Drop the last tokens of each sequence, such as proposed ones that were not accepted."""
        length = as_int("length", length, 0, self.length)
        self._layout = Layout.from_spans(self._spans(length), length)
        self._left, self._new = min(self._left, 0), 0
        for stored in self._layers.values():
            stored.length = min(stored.length, length)

    def attend(
        self, layer: Hashable, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Store the step's keys and values, and return attention of its queries over all keys.

        All ranks have the same q (T, Hq, D), k (T, Hkv, D) and v (T, Hkv, Dv), or with the batch in
        front, of the T tokens of the step. The options, the result and the bytes sent are those of
        `Attention.decode`.
        """
        stored = self._layers.get(layer)
        if stored is None:
            raise ValueError(f"layer must be one that was put, {list(self._layers)}, got {layer!r}")
        if not self._new or stored.length < self.length - self._new:
            behind = f"has {stored.length} of {self.length} tokens"
            raise ValueError(
                f"layer {layer!r} must attend once in each step of extend: it {behind}"
            )
        refuse_gradients(q=q, k=k, v=v)
        self._check(stored, q=q, k=k, v=v)
        rows = self._layout.tokens_on(self.attn.rank)
        if self._owner == self.attn.rank:
            kept = rows - self._new
            if not stored.ours or stored.k.shape[-3] < rows:
                capacity = rows + max(rows // 8, self._block)
                stored.k = _grown(stored.k, kept, capacity)
                stored.v = _grown(stored.v, kept, capacity)
                stored.ours = True
            for whole, x in ((stored.k, k), (stored.v, v)):
                whole.narrow(-3, kept, self._new).copy_(x.detach())
        stored.length = self.length
        k, v = stored.k.narrow(-3, 0, rows), stored.v.narrow(-3, 0, rows)
        return self.attn.decode(q, k, v, self._layout, **options)

    def _check(self, stored: _Layer, **operands: Tensor) -> None:
        for name, x in operands.items():
            check_tensor(name, x)
            if x.dim() != stored.k.dim() or x.shape[-3] != self._new:
                expected = f"{stored.k.dim()} dimensions, and {self._new} tokens, the step's"
                raise ValueError(f"{name} must have {expected}, got {tuple(x.shape)}")
        for name, x, kept in (("k", operands["k"], stored.k), ("v", operands["v"], stored.v)):
            shapes = [(*y.shape[:-3], *y.shape[-2:]) for y in (x, kept)]
            if shapes[0] != shapes[1] or x.dtype != kept.dtype or x.device != kept.device:
                expected = f"{tuple(kept.shape)} of {kept.dtype} on {kept.device}"
                found = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
                raise ValueError(f"{name} must be like the cache's, {expected}, got {found}")

    def _spans(self, length: int) -> list[list[tuple[int, int, int]]]:
        """Return each rank's spans of the first so many tokens."""
        return [
            [(0, start, min(stop, length)) for _, start, stop in spans if start < length]
            for spans in map(self._layout.spans, range(self._layout.ranks))
        ]


def _grown(x: Tensor, rows: int, capacity: int) -> Tensor:
    """Return a tensor with the first rows of x (…, T, H, D), and room for so many in all."""
    with torch.inference_mode(False), torch.no_grad():  # else only inference mode may write to it
        grown = x.new_empty((*x.shape[:-3], capacity, *x.shape[-2:]))
        grown.narrow(-3, 0, rows).copy_(x.narrow(-3, 0, rows))
    return grown
