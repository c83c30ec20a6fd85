"""Linear attention over spans in plain PyTorch, each in the parallel form (QKᵀ ⊙ Λ) V: what other backends are tested against.

Tensors of a span have their heads first, grouped by KV head: q (B, Hkv, G, L, D), k (B, Hkv, 1, L, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seqpar.attend import accumulator_dtype

if TYPE_CHECKING:
    from seqpar.linear import Recurrence, Spans


class _Work:
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        self.operands, self.dtype, self.spans, self.recurrence = (q, k, v), q.dtype, spans, recurrence
        self.exact = accumulator_dtype(q.dtype)
        self.heads = k.shape[2]

    def each(self, *tensors: Tensor) -> Iterator[tuple[slice, int, int, list[Tensor]]]:
        """The rows of each span, what enters and leaves, and its part of the tensors, the keys' (B, Hkv, 1, L, D)."""
        columns = self.spans.edges[:-1], self.spans.edges[1:], self.spans.enter, self.spans.leave
        for start, stop, enter, leave in zip(*(x.tolist() for x in columns), strict=True):
            rows = slice(start, stop)
            parts = (x[:, rows].to(self.exact).transpose(1, 2) for x in tensors)
            yield rows, enter, leave, [x.unflatten(1, (self.heads, -1)) for x in parts]

    def powers(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """λ^{i−j} (Hkv, 1, L, L), 0 for j > i; λ^{i+1} and λ^{L−1−i} (Hkv, 1, L, 1). All 1 without causality."""
        i = torch.arange(length, device=device)
        between, head, tail = i[:, None] - i, i + 1, length - 1 - i
        if not self.recurrence.causal:
            between, head, tail = (torch.zeros_like(x) for x in (between, head, tail))
        powers = (self.recurrence.power(x, self.heads).movedim(-1, 0).to(self.exact) for x in (between, head, tail))
        between, head, tail = powers
        return between[:, None], head[:, None, :, None], tail[:, None, :, None]

    def empty_states(self, count: int) -> Tensor:
        q, _, v = self.operands
        return q.new_zeros((count, q.shape[0], self.heads, q.shape[3], v.shape[3]), dtype=self.exact)


class Forward(_Work):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.states = self.empty_states(spans.leaving)
        for _, _, leave, (k_span, v_span) in self.each(k, v):
            if leave >= 0:
                tail = self.powers(k_span.shape[-2], k.device)[2]
                self.states[leave] = ((k_span * tail).mT @ v_span)[:, :, 0]

    def local(self) -> None:
        """Everything is done in `finish`."""

    def finish(self, initial: Tensor | None) -> Tensor:
        q, _, v = self.operands
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        for rows, enter, _, (q, k, v) in self.each(*self.operands):
            between, head, _ = self.powers(q.shape[-2], q.device)
            part = torch.zeros_like(q[..., :1])
            if self.recurrence.causal:
                part = (q @ k.mT * between) @ v
            if enter >= 0 and initial is not None:
                part = part + (q * head) @ initial[enter][:, :, None]
            out[:, rows] = (self.recurrence.scale * part).flatten(1, 2).transpose(1, 2).to(self.dtype)
        return out


class Backward(_Work):
    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spans: Spans, recurrence: Recurrence, initial: Tensor | None
    ) -> None:
        super().__init__(q, k, v, spans, recurrence)
        self.dout, self.initial = dout, initial
        self.states = self.empty_states(spans.entering)
        for _, enter, _, (q_span, dout_span) in self.each(q, dout):
            if enter >= 0:
                head = self.powers(q_span.shape[-2], q.device)[1]
                self.states[enter] = recurrence.scale * ((q_span * head).mT @ dout_span).sum(2)

    def local(self) -> None:
        """Everything is done in `finish`."""

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradients = [torch.zeros_like(x, dtype=self.exact) for x in self.operands]
        for rows, enter, leave, (q, k, v, dout) in self.each(*self.operands, self.dout):
            between, head, tail = self.powers(q.shape[-2], q.device)
            q = q * self.recurrence.scale
            parts = [torch.zeros_like(x) for x in (q, k, v)]
            if self.recurrence.causal:
                dscore = (dout @ v.mT) * between
                score = (q @ k.mT) * between
                parts = [self.recurrence.scale * (dscore @ k), (dscore.mT @ q).sum(2, True), (score.mT @ dout).sum(2, True)]
            if enter >= 0 and self.initial is not None:
                parts[0] = parts[0] + self.recurrence.scale * (dout * head) @ self.initial[enter][:, :, None].mT
            if leave >= 0 and dfinal is not None:
                parts[1] = parts[1] + (v * tail) @ dfinal[leave][:, :, None].mT
                parts[2] = parts[2] + (k * tail) @ dfinal[leave][:, :, None]
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[:, rows] = part.flatten(1, 2).transpose(1, 2)
        return dq, dk, dv
