"""The backend "reference" for states: plain PyTorch, which computes each span as (QKᵀ ⊙ Λ) V.

A *span* is a range of consecutive tokens of a document on one rank. All other backends are tested
against this backend. Tensors of a span have the heads first, grouped by KV head: q (B, Hkv, G, L,
D), k (B, Hkv, 1, L, D) and v (B, Hkv, 1, L, Dv), with batch B, G query heads that share a KV head,
and L rows. States are (n, B, Hkv, D, Dv).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions


class _Work:
    def __init__(self, inputs: Inputs, spans: SpanStates, options: StateOptions) -> None:
        self.operands, self.spans, self.options = inputs[:3], spans, options
        self.accumulator = accumulator_dtype(inputs.q.dtype)
        self.heads = inputs.heads

    def local(self) -> None:
        """Do nothing: `finish` computes everything."""

    def each(self, *tensors: Tensor) -> Iterator[tuple[slice, int, int, list[Tensor]]]:
        """Yield, for each span, its rows, its two states, and its rows of `tensors`.

        A *span* is a range of a document's tokens on one rank. The two states are the state that
        enters the span and the state that leaves the span. Each state is given as an index, or as
        −1 if this state is not needed. `tensors` are (B, T, H, D), and the rows of a span are (B,
        Hkv, G or 1, L, D).
        """
        spans = self.spans
        columns = spans.edges[:-1], spans.edges[1:], spans.state_in, spans.state_out
        for start, stop, enter, leave in zip(*(x.tolist() for x in columns), strict=True):
            rows = slice(start, stop)
            parts = (x[:, rows].to(self.accumulator) for x in tensors)
            heads_first = (rearrange(x, "b l (h g) d -> b h g l d", h=self.heads) for x in parts)
            yield rows, enter, leave, list(heads_first)

    def powers(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors of powers for rows i and j of a span of L rows: λ^{i−j} (0 for j >
        i), λ^{i+1} and λ^{L−1−i}.

        Without causality, all powers are 1.
        """
        i = torch.arange(length, device=device)
        between, head, tail = i[:, None] - i, i + 1, length - 1 - i
        if not self.options.causal:
            between, head, tail = (torch.zeros_like(x) for x in (between, head, tail))
        between, head, tail = (
            self.options.power(x, self.heads).movedim(-1, 0).to(self.accumulator)
            for x in (between, head, tail)
        )
        return between[:, None], head[:, None, :, None], tail[:, None, :, None]


class Forward(_Work):
    def __init__(self, inputs: Inputs, spans: SpanStates, options: StateOptions) -> None:
        super().__init__(inputs, spans, options)
        self.outgoing = options.empty(inputs, spans.states_out)
        for _, _, leave, (k_span, v_span) in self.each(inputs.k, inputs.v):
            if leave >= 0:
                tail = self.powers(k_span.shape[-2], k_span.device)[2]
                self.outgoing[leave] = ((k_span * tail).mT @ v_span)[:, :, 0]

    def finish(self, initial: Tensor | None) -> Tensor:
        q, _, v = self.operands
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        for rows, enter, _, (q, k, v) in self.each(*self.operands):
            between, head, _ = self.powers(q.shape[-2], q.device)
            part = torch.zeros_like(q[..., :1])
            if self.options.causal:
                part = (q @ k.mT * between) @ v
            if enter >= 0 and initial is not None:
                part = part + (q * head) @ initial[enter][:, :, None]
            part = rearrange(self.options.scale * part, "b h g l d -> b l (h g) d")
            out[:, rows] = part.to(out.dtype)
        return out


class Backward(_Work):
    def __init__(
        self,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: StateOptions,
        initial: Tensor | None,
    ) -> None:
        super().__init__(inputs, spans, options)
        self.dout, self.initial = dout, initial
        self.outgoing = options.empty(inputs, spans.states_in)
        for _, enter, _, (q_span, dout_span) in self.each(inputs.q, dout):
            if enter >= 0:
                head = self.powers(q_span.shape[-2], q_span.device)[1]
                self.outgoing[enter] = options.scale * ((q_span * head).mT @ dout_span).sum(2)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradients = [
            torch.zeros_like(x, dtype=self.accumulator) for x in self.operands
        ]
        for rows, enter, leave, (q, k, v, dout) in self.each(*self.operands, self.dout):
            between, head, tail = self.powers(q.shape[-2], q.device)
            q = q * self.options.scale
            parts = [torch.zeros_like(x) for x in (q, k, v)]
            if self.options.causal:
                dscore = (dout @ v.mT) * between
                score = (q @ k.mT) * between
                parts = [
                    self.options.scale * (dscore @ k),
                    (dscore.mT @ q).sum(2, True),
                    (score.mT @ dout).sum(2, True),
                ]
            if enter >= 0 and self.initial is not None:
                state = self.initial[enter][:, :, None]
                parts[0] = parts[0] + self.options.scale * (dout * head) @ state.mT
            if leave >= 0 and dfinal is not None:
                dstate = dfinal[leave][:, :, None]
                parts[1] = parts[1] + (v * tail) @ dstate.mT
                parts[2] = parts[2] + (k * tail) @ dstate
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[:, rows] = rearrange(part, "b h g l d -> b l (h g) d")
        return dq, dk, dv
