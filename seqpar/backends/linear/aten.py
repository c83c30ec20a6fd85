"""Linear attention over spans in batched matrix products, chunk by chunk: fast on CPUs, and wherever torch is.

Qin et al., "Lightning Attention-2" (2024), section 3: spans are cut into chunks of C rows; what a chunk's rows owe to each
other is (QKᵀ ⊙ Λ) V, what they owe to earlier ones comes of the state that enters the chunk. A product is over all heads of
one chunk, read where it stands. States pass between the chunks of a block in one product with powers of λ, and from block to
block with λ^L in fp64: the rounding of λ^C, chunk by chunk, would add up. Half precision is computed in fp32.

A chunk's tensors are (N, G·C, D), with N = B·Hkv: the G query heads that share a KV head stand one after another as rows,
which also sums over them where that is wanted. States are (n, B, Hkv, D, Dv) outside, and (N, D, Dv) within.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.attend import accumulator_dtype
from seqpar.geometry import Ints, numbers

if TYPE_CHECKING:
    from seqpar.linear import Recurrence, Spans

CHUNK = 128  # rows at most; 64 are faster for head dims up to 64
_BLOCK = 16  # chunks


class Chunk(NamedTuple):
    """Some consecutive rows of one span."""

    rows: slice
    span: int
    first: bool  # of its span
    last: bool
    since: int  # rows between the span's start and the chunk
    until: int  # rows between the chunk and the span's end

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


class Block(NamedTuple):
    """Consecutive chunks, and how many rows are between them, or −1 between those of different spans and in the wrong order."""

    chunks: list[Chunk]
    before: Tensor  # (m, m + 1): between chunk j < i and chunk i; in the last column between the block's start and chunk i
    behind: Tensor  # (m, m + 1): between chunk i and chunk j > i; in the last column between chunk i and the block's end


def blocks_of(spans: Spans, size: int, device: torch.device) -> list[Block]:
    """The spans' chunks of `size` rows; kept with them."""
    key = "aten", size, device
    if key not in spans.lowered:
        count = -(-np.diff(spans.edges) // size)
        span = np.repeat(np.arange(count.size), count)
        first, last = spans.edges[span], spans.edges[span + 1]
        start = first + size * numbers(count)
        stop = np.minimum(start + size, last)
        columns = [span, start == first, stop == last, start - first, last - stop]
        rows = map(slice, start.tolist(), stop.tolist())
        chunks = list(map(Chunk, rows, *(x.tolist() for x in columns)))
        parts = [slice(i, i + _BLOCK) for i in range(0, len(chunks), _BLOCK)]
        spans.lowered[key] = [Block(chunks[x], *_between(span[x], start[x], stop[x], device)) for x in parts]
    return spans.lowered[key]


def _between(span: Ints, start: Ints, stop: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
    order = np.arange(span.size)
    same, earlier = span[:, None] == span, order[:, None] > order
    before = np.where(same & earlier, start[:, None] - stop, -1)
    behind = np.where(same & earlier.T, start - stop[:, None], -1)
    entered = np.where(span == span[0], start - start[0], -1)
    left = np.where(span == span[-1], stop[-1] - stop, -1)
    before, behind = np.c_[before, entered], np.c_[behind, left]
    return torch.from_numpy(before).to(device), torch.from_numpy(behind).to(device)


class _Work:
    """What forward and backward share: chunks of tensors, powers of λ, and states that enter chunks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        self.q, self.k, self.v, self.spans, self.recurrence = q, k, v, spans, recurrence
        self.exact = accumulator_dtype(q.dtype)
        self.batch, self.heads, self.causal = q.shape[0], k.shape[2], recurrence.causal
        self.group = q.shape[2] // self.heads
        size = min(CHUNK, 64 if max(q.shape[3], v.shape[3]) <= 64 else 128)
        self.blocks = blocks_of(spans, size, q.device)
        i = torch.arange(size + 1, device=q.device)
        self._powers = self.power(i)  # (N, C + 1)
        self._mask = self.power(i[:-1, None] - i[:-1]) * recurrence.scale if self.causal else None  # (N, C, C)
        self.head, self.tail, self.mask = cache(self._head), cache(self._tail), cache(self._mask_of)

    def power(self, exponents: Tensor) -> Tensor:
        """(N, …): λ^exponents, 0 where they are negative, and where a product with them might be a slow subnormal number."""
        powers = self.recurrence.power(exponents, self.heads).movedim(-1, 0).to(self.exact)
        range_ = torch.finfo(self.exact)
        return powers.where(powers > range_.tiny / range_.eps, 0).repeat(self.batch, *[1] * exponents.dim())

    def _head(self, length: int) -> Tensor:
        """(N, G·C, 1): scale · λ^{i+1} for the query rows i of a chunk."""
        return self._powers[:, 1 : length + 1].repeat(1, self.group)[..., None] * self.recurrence.scale

    def _tail(self, length: int) -> Tensor:
        """(N, C, 1): λ^{C−1−i} for the key rows."""
        return self._powers[:, :length].flip(1)[..., None]

    def _mask_of(self, length: int) -> Tensor:
        """(N, G·C, C): scale · λ^{i−j}, 0 for j > i."""
        assert self._mask is not None
        return self._mask[:, :length, :length].repeat(1, self.group, 1)

    def part(self, x: Tensor, chunk: Chunk) -> Tensor:
        """(N, G·C, D) of x (B, T, H, D); a view where that is possible."""
        heads_first = x[:, chunk.rows].unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1, 4)
        return heads_first.flatten(0, 1).flatten(1, 2).to(self.exact)

    def put(self, target: Tensor, part: Tensor, chunk: Chunk, add: bool = False) -> None:
        """Set a chunk's rows of `target` (B, T, H, D), or add to them."""
        rows = part.view(self.batch, self.heads, -1, chunk.length, part.shape[-1]).permute(0, 3, 1, 2, 4)
        where = target[:, chunk.rows].unflatten(2, (self.heads, -1))
        where.add_(rows) if add else where.copy_(rows)

    def each(self) -> Iterator[tuple[int, Chunk]]:
        yield from enumerate(chunk for block in self.blocks for chunk in block.chunks)

    def sweep(self, x: Tensor, y: Tensor, wanted: Ints, reverse: bool) -> tuple[list[Tensor], Tensor]:
        """Σ xᵀy, with decay, of the rows before each chunk in its span, a list of (N, D, Dv), and the states of whole spans.

        With `reverse`, of the rows behind it, and what they add to the gradient of the state that enters the span.
        """
        shape = self.batch, self.heads, x.shape[3], y.shape[3]
        states = x.new_zeros((int((wanted >= 0).sum()), *shape), dtype=self.exact)
        entering: list[Tensor] = []
        carried = x.new_zeros((self.batch * self.heads, *shape[2:]), dtype=torch.float64)
        edge = 0 if reverse else -1
        for block in reversed(self.blocks) if reverse else self.blocks:
            own = x.new_empty((len(block.chunks), *carried.shape), dtype=self.exact)
            for i, chunk in enumerate(block.chunks):
                weights = (self.head if reverse else self.tail)(chunk.length)
                torch.bmm((self.part(x, chunk) * weights).mT, self.part(y, chunk), out=own[i])
            rows = block.behind if reverse else block.before
            weights = self.power(rows)  # (N, m, m + 1)
            entry = weights[:, :, :-1] @ own.flatten(2).transpose(0, 1)
            at_edge = entry[:, edge].to(carried, copy=True).view_as(carried)
            entry = entry.baddbmm_(weights[:, :, -1:], carried.flatten(1)[:, None].to(self.exact)).unflatten(2, shape[2:])
            for i, chunk in enumerate(block.chunks):
                if (chunk.first if reverse else chunk.last) and wanted[chunk.span] >= 0:
                    leaving = entry[:, i] * self._powers[:, chunk.length, None, None] + own[i]
                    states[int(wanted[chunk.span])] = leaving.view(shape)
            chunk, before = block.chunks[edge], rows[edge, -1]
            if chunk.first if reverse else chunk.last:
                carried.zero_()
            else:
                lengths = torch.stack([torch.where(before < 0, before, before + chunk.length), rows.new_tensor(chunk.length)])
                all_of_it, last = self.recurrence.power(lengths, self.heads).repeat(1, self.batch)[..., None, None]
                carried.mul_(all_of_it).addcmul_(at_edge, last).add_(own[edge])
            entering.append(entry)
        ordered = entering[::-1] if reverse else entering
        return [entry[:, i] for entry in ordered for i in range(entry.shape[1])], states

    def entering(self, number: int, chunk: Chunk, inner: list[Tensor], outer: Tensor | None, reverse: bool) -> Tensor:
        """What enters a chunk: what comes of its own span, and what is left of what enters the span."""
        index = int((self.spans.leave if reverse else self.spans.enter)[chunk.span])
        if outer is None or index < 0:
            return inner[number]
        state = outer[index].flatten(0, 1)
        if not self.causal:
            return state
        rows = torch.tensor(chunk.until if reverse else chunk.since, device=state.device)
        return inner[number] + self.power(rows)[:, None, None] * state


class Forward(_Work):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.inner, self.states = self.sweep(k, v, spans.leave, reverse=False)
        self.out: Tensor | None = None

    def local(self) -> None:
        if self.causal:
            self.out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3]), dtype=self.exact)
            for _, chunk in self.each():
                self.put(self.out, self.within(chunk), chunk)

    def finish(self, initial: Tensor | None) -> Tensor:
        out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3])) if self.out is None else self.out
        for number, chunk in self.each():
            q = self.part(self.q, chunk) * self.head(chunk.length)
            state = self.entering(number, chunk, self.inner, initial, reverse=False)
            if self.causal and self.out is None:
                self.put(out, torch.baddbmm(self.within(chunk), q, state), chunk)
            else:
                self.put(out, q @ state, chunk, add=self.out is not None)
        return out.to(self.q.dtype)

    def within(self, chunk: Chunk) -> Tensor:
        """What a chunk's rows owe to each other."""
        q, k, v = (self.part(x, chunk) for x in (self.q, self.k, self.v))
        return (q @ k.mT).mul_(self.mask(chunk.length)) @ v


class Backward(_Work):
    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spans: Spans, recurrence: Recurrence, initial: Tensor | None
    ) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.dout, self.initial = dout, initial
        self.inner, self.states = self.sweep(q, dout, spans.enter, reverse=True)
        self.gradients: list[Tensor] | None = None

    def local(self) -> None:
        self.gradients = self._empty()
        for number, chunk in self.each():
            for gradient, part in zip(self.gradients, self.within(number, chunk), strict=True):
                self.put(gradient, part, chunk)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.gradients or self._empty()
        for number, chunk in self.each():
            state = self.entering(number, chunk, self.inner, dfinal, reverse=True)
            k, v = (self.part(x, chunk) for x in (self.k, self.v))
            tail = self.tail(chunk.length)
            dk_part, dv_part = (v * tail) @ state.mT, (k * tail) @ state
            if self.gradients is None:
                dq_part, dk_own, dv_own = self.within(number, chunk)
                self.put(dq, dq_part, chunk)
                dk_part, dv_part = dk_part.add_(dk_own), dv_part.add_(dv_own)
            self.put(dk, dk_part, chunk, add=self.gradients is not None)
            self.put(dv, dv_part, chunk, add=self.gradients is not None)
        return dq, dk, dv

    def within(self, number: int, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """dq of a chunk, and what dk and dv owe to the chunk's own rows."""
        q, k, v, dout = (self.part(x, chunk) for x in (self.q, self.k, self.v, self.dout))
        state = self.entering(number, chunk, self.before, self.initial, reverse=False)
        dq = (dout * self.head(chunk.length)) @ state.mT
        if not self.causal:
            return dq, torch.zeros_like(k), torch.zeros_like(v)
        mask = self.mask(chunk.length)
        score, dscore = (q @ k.mT).mul_(mask), (dout @ v.mT).mul_(mask)
        return dq.baddbmm_(dscore, k), dscore.mT @ q, score.mT @ dout

    @cached_property
    def before(self) -> list[Tensor]:
        """What entered each chunk in forward from its own span."""
        return self.sweep(self.k, self.v, np.full_like(self.spans.leave, -1), reverse=False)[0] if self.causal else []

    def _empty(self) -> list[Tensor]:
        return [x.new_empty(x.shape, dtype=self.exact) for x in (self.q, self.k, self.v)]
