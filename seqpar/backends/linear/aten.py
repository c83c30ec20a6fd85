"""Linear attention over spans in batched matrix products over chunks: fast wherever torch is.

Qin et al., "Lightning Attention-2" (2024), section 3: spans are cut into chunks of C rows; within a chunk (QKᵀ ⊙ Λ) V, and
what precedes it comes from the state that enters the chunk. Chunks are computed a block at a time, all of its products at
once, so that temporaries stay in the caches; states pass between the chunks of a block in one product with powers of λ, and
from block to block in fp64, where the rounding of λ^C would add up. Computed in fp32 (fp64).

A block's tensors are (B, Hkv, m, C, D): batch, KV head, chunk, row, feature; the G query heads that share a KV head stand
one after another as rows, (B, Hkv, m, G·C, D), which also sums over them where that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.geometry import Ints

if TYPE_CHECKING:
    from seqpar.linear import Recurrence, Spans

CHUNK = 128
_SCORES = 2**18  # a block has so many chunks that its scores stay below this


@dataclass(frozen=True)
class Block:
    """Some chunks, one after another. Where a chunk has less than C rows, row 0 stands for those that are not `there`."""

    rows: Any  # a slice of the rank's rows, or (m·C,) their indices
    there: Tensor | None  # (m·C,) or None if all are
    head: Tensor  # (m, C) i + 1, counted within the chunk
    tail: Tensor  # (m, C) rows of the chunk behind row i
    length: Tensor  # (m,)
    before: Tensor  # (m, m + 1) rows between chunk c' < c of a span and c, then between the block's start and c; or −1
    behind: Tensor  # (m, m + 1) rows between c and c' > c, then between c and the block's end; or −1
    since: Tensor  # (m,) rows between the span's start and the chunk
    until: Tensor  # (m,) rows between the chunk and the span's end
    spans: Ints  # (m,) the chunks' spans
    first: Ints  # (m,) bool: first of its span
    last: Ints  # (m,) bool: last of its span


def blocks_of(spans: Spans, batch_heads: int, device: torch.device) -> list[Block]:
    """The spans' chunks in blocks; kept with them."""
    size = max(1, _SCORES // (CHUNK * CHUNK * batch_heads))
    key = "aten", CHUNK, size, device
    if key not in spans.lowered:
        count = -(-np.diff(spans.edges) // CHUNK)
        span = np.repeat(np.arange(count.size), count)
        number = np.arange(span.size) - np.repeat(np.cumsum(count) - count, count)
        start = spans.edges[span] + number * CHUNK
        stop = np.minimum(start + CHUNK, spans.edges[span + 1])
        parts = (slice(i, i + size) for i in range(0, span.size, size))
        spans.lowered[key] = [_block(spans.edges, span[x], start[x], stop[x], device) for x in parts]
    return spans.lowered[key]


def _block(edges: Ints, span: Ints, start: Ints, stop: Ints, device: torch.device) -> Block:
    row = start[:, None] + np.arange(CHUNK)
    there, c = row < stop[:, None], np.arange(span.size)
    same, first, last = span[:, None] == span, start == edges[span], stop == edges[span + 1]
    before = np.where(same & (c[:, None] > c), start[:, None] - stop, -1)
    behind = np.where(same & (c[:, None] < c), start - stop[:, None], -1)
    entered = np.where((span == span[0]) & ~first[0], start - start[0], -1)
    left = np.where((span == span[-1]) & ~last[-1], stop[-1] - stop, -1)

    def on_device(x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Block(
        slice(start[0], stop[-1]) if there.all() else on_device(np.where(there, row, 0).ravel()),
        None if there.all() else on_device(there.ravel()),
        on_device(np.tile(np.arange(1, CHUNK + 1), (span.size, 1))), on_device(np.maximum(stop[:, None] - 1 - row, 0)),
        on_device(stop - start), on_device(np.c_[before, entered]), on_device(np.c_[behind, left]),
        on_device(start - edges[span]), on_device(edges[span + 1] - stop), span, first, last,
    )  # fmt: skip


class _Work:
    """What forward and backward share: tensors by block, and powers of λ."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        self.q, self.k, self.v, self.spans, self.recurrence = q, k, v, spans, recurrence
        self.exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.heads, self.causal = k.shape[2], recurrence.causal
        self.blocks = blocks_of(spans, q.shape[0] * q.shape[2], q.device)
        i = torch.arange(CHUNK, device=q.device)
        causal = self.power(i[:, None] - i)  # (Hkv, C, C)
        self.mask = causal.repeat(1, q.shape[2] // k.shape[2], 1)[:, None]  # (Hkv, 1, G·C, C)

    def power(self, exponents: Tensor) -> Tensor:
        """(Hkv, …): λ^exponents, 0 where they are negative."""
        return self.recurrence.power(exponents, self.heads).movedim(-1, 0).to(self.exact)

    def part(self, x: Tensor, block: Block) -> Tensor:
        """(B, Hkv, m, G·C, D) of x (B, T, H, D), zero where no row is."""
        if block.there is None:
            rows = x[:, block.rows].to(self.exact)
        else:
            rows = x[:, block.rows].to(self.exact) * block.there[:, None, None]
        heads_first = rows.unflatten(1, (-1, CHUNK)).unflatten(3, (self.heads, -1)).permute(0, 3, 1, 4, 2, 5)
        return heads_first.flatten(3, 4)

    def put(self, target: Tensor, part: Tensor, block: Block, add: bool = False) -> None:
        """Set the block's rows of `target` (B, T, H, D), or add to them."""
        rows = part.unflatten(3, (-1, CHUNK)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2).to(target.dtype)
        if block.there is None:
            where = block.rows
        else:
            where, rows = block.rows[block.there], rows[:, block.there]
        target[:, where] = target[:, where] + rows if add else rows

    def weighted(self, x: Tensor, exponents: Tensor) -> Tensor:
        """x (B, Hkv, m, G·C, D) times λ^exponents (m, C) in each row."""
        weights = self.power(exponents)[..., None]
        return x * (weights if x.shape[3] == CHUNK else weights.repeat(1, 1, x.shape[3] // CHUNK, 1))

    def sweep(self, x: Tensor, y: Tensor, wanted: Ints, reverse: bool) -> tuple[list[Tensor], Tensor]:
        """Σ xᵀy, with decay, of the rows before each chunk in its span, (B, Hkv, m, D, Dv) a block, and that of whole spans.

        With `reverse`, of the rows behind it, and what they add to the gradient of the state that precedes them.
        """
        states = x.new_zeros((int((wanted >= 0).sum()), x.shape[0], self.heads, x.shape[3], y.shape[3]), dtype=self.exact)
        entering: list[Tensor] = []
        carried: Tensor | None = None
        for block in reversed(self.blocks) if reverse else self.blocks:
            x_part, y_part = self.part(x, block), self.part(y, block)
            own = self.weighted(x_part, block.head if reverse else block.tail).mT @ y_part
            weights = self.power(block.behind if reverse else block.before)  # (Hkv, m, m + 1)
            flat = own.flatten(3)
            entry = (weights[:, :, :-1] @ flat).view_as(own)
            if carried is not None:
                entry += weights[None, :, :, -1, None, None] * carried[:, :, None]
            entering.append(entry)
            ends, end = (block.first, 0) if reverse else (block.last, -1)
            full = self.recurrence.power(block.length, self.heads).T  # (Hkv, m) fp64
            for i in np.flatnonzero(ends & (wanted[block.spans] >= 0)).tolist():
                states[wanted[block.spans[i]]] = _leave(entry, own, full, i, self.exact)
            carried = None if ends[end] else _leave(entry, own, full, end, self.exact)
        return entering[::-1] if reverse else entering, states

    def entering(self, inner: list[Tensor], outer: Tensor | None, of_span: Ints, reverse: bool) -> list[Tensor]:
        """What enters each chunk: what comes of its own span, and what is left of that which enters the span."""
        made = []
        for number, block in enumerate(self.blocks):
            index = of_span[block.spans]
            if outer is None or (index < 0).all():
                made.append(inner[number])
                continue
            entered = torch.from_numpy(index >= 0).to(outer.device)
            weights = self.power(torch.where(entered, block.until if reverse else block.since, -1))[..., None, None]
            state = outer[torch.from_numpy(np.maximum(index, 0)).to(outer.device)].permute(1, 2, 0, 3, 4) * weights
            made.append(state + inner[number] if self.causal else state)
        return made


def _leave(entry: Tensor, own: Tensor, full: Tensor, i: int, dtype: torch.dtype) -> Tensor:
    """(B, Hkv, D, Dv): what leaves chunk i; in fp64, where λ^C is exact."""
    return (entry[:, :, i].double() * full[:, i, None, None] + own[:, :, i]).to(dtype)


class Forward(_Work):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.inner, self.states = self.sweep(k, v, spans.leave, reverse=False)
        self.out: Tensor | None = None

    def local(self) -> None:
        if self.causal:
            self.out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3]), dtype=self.exact)
            for block in self.blocks:
                self.put(self.out, self.within(block), block)

    def finish(self, initial: Tensor | None) -> Tensor:
        entering = self.entering(self.inner, initial, self.spans.enter, reverse=False)
        out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3])) if self.out is None else self.out
        for block, state in zip(self.blocks, entering, strict=True):
            part = self.weighted(self.part(self.q, block), block.head) @ state * self.recurrence.scale
            if self.causal and self.out is None:
                part += self.within(block)
            self.put(out, part, block, add=self.out is not None)
        return out.to(self.q.dtype)

    def within(self, block: Block) -> Tensor:
        """What comes of the chunks' own rows."""
        q, k, v = (self.part(x, block) for x in (self.q, self.k, self.v))
        return (q @ k.mT).mul_(self.mask) @ v * self.recurrence.scale


class Backward(_Work):
    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spans: Spans, recurrence: Recurrence, initial: Tensor | None
    ) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.dout, self.initial = dout, initial
        self.behind, self.states = self.sweep(q, dout, spans.enter, reverse=True)
        self.states *= recurrence.scale
        self.gradients: list[Tensor] | None = None

    def local(self) -> None:
        before = self.sweep(self.k, self.v, np.full_like(self.spans.leave, -1), reverse=False)[0] if self.causal else []
        self.gradients = [x.new_empty(x.shape, dtype=self.exact) for x in (self.q, self.k, self.v)]
        for block, state in zip(self.blocks, self.entering(before, self.initial, self.spans.enter, reverse=False), strict=True):
            q, k, v, dout = (self.part(x, block) for x in (self.q, self.k, self.v, self.dout))
            dq, dk, dv = self.weighted(dout, block.head) @ state.mT, torch.zeros_like(k), torch.zeros_like(v)
            if self.causal:
                score, dscore = (q @ k.mT).mul_(self.mask), (dout @ v.mT).mul_(self.mask)
                dq += dscore @ k
                dk, dv = dscore.mT @ q, score.mT @ dout
            for gradient, part in zip(self.gradients, (dq, dk, dv), strict=True):
                self.put(gradient, part.mul_(self.recurrence.scale), block)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.gradients is None:
            self.local()
        assert self.gradients is not None
        dq, dk, dv = self.gradients
        behind = [state * self.recurrence.scale for state in self.behind]
        for block, state in zip(self.blocks, self.entering(behind, dfinal, self.spans.leave, reverse=True), strict=True):
            for gradient, x, matrix in ((dk, self.v, state.mT), (dv, self.k, state)):
                self.put(gradient, self.weighted(self.part(x, block), block.tail) @ matrix, block, add=True)
        return dq, dk, dv
