"""The backend "reference" for maps: the plain recurrence, one token after another.

All other backends are tested against this backend. A *span* is a range of consecutive tokens of a
document on one rank. Tensors of a span have the tokens as their first dimension: q (L, B, H, G, K),
where G query heads share a state, k (L, B, H, K), v (L, B, H, V), decay (L, B, H, K or 1), and beta
(L, B, H, 1). A state is (B, H, K, V).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.linear.inputs import Gradients, Inputs, expand, fold
from seqpar.linear.kinds import advance, read
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import transposed
from seqpar.linear.routes import SpanStates


class _Span(NamedTuple):
    rows: slice
    state_in: int
    state_out: int
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # exp of log_decay
    beta: Tensor | None


class _Work:
    def __init__(self, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        self.kind, self.inputs, self.spans, self.options = options.kind, inputs, spans, options
        self.expanded = expand(inputs)

    def local(self) -> None:
        """Do nothing: `finish` computes everything."""

    def each(self) -> Iterator[_Span]:
        q, k, v, log_decay, beta = (None if x is None else x.transpose(0, 1) for x in self.expanded)
        assert q is not None and k is not None and v is not None
        q = q.unflatten(2, (k.shape[2], -1)) * self.options.scale
        decay = torch.ones_like(k[..., :1]) if log_decay is None else log_decay.exp()
        spans = self.spans
        for span, (start, stop) in enumerate(zip(spans.edges[:-1], spans.edges[1:], strict=True)):
            rows = slice(int(start), int(stop))
            states = int(spans.state_in[span]), int(spans.state_out[span])
            parts = q[rows], k[rows], v[rows], decay[rows]
            yield _Span(rows, *states, *parts, None if beta is None else beta[rows])

    def entering(self, states: Tensor | None, index: int) -> Tensor:
        if states is not None and index >= 0:
            return states[index]
        return self.expanded.k.new_zeros(self.inputs.state_shape)

    def transition(self, span: _Span) -> Tensor:
        """Return the factor by which a span (a range of tokens) multiplies the state that enters
        the span.

        With the delta rule, this factor is the state that leaves the span if the identity matrix
        enters the span and all values are 0. Without the delta rule, the factor is the product of
        the decays.
        """
        if span.beta is not None:
            dim = span.k.shape[-1]
            states = torch.eye(dim, dtype=span.k.dtype, device=span.k.device)
            states = states.expand(*span.k.shape[1:3], dim, dim)
            for k, decay, beta in zip(span.k, span.decay, span.beta, strict=True):
                states = advance(states, k, torch.zeros_like(k), decay, beta)
            return states
        product = span.decay.prod(0)
        return product if self.kind.transition == "key" else product[..., 0]


class Forward(_Work):
    def __init__(self, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        super().__init__(inputs, spans, options)
        self.outgoing = options.empty(inputs, spans.states_out)
        for span in self.each():
            if span.state_out >= 0:
                for state in self.states(span, None):
                    last = state
                self.outgoing.state[span.state_out] = last
                if span.state_in >= 0:
                    self.outgoing.transition[span.state_out] = self.transition(span)

    def finish(self, states_in: Tensor | None) -> Tensor:
        out = self.inputs.q.new_zeros(self.inputs.out_shape)
        for span in self.each():
            states = self.states(span, states_in)
            next(states)
            for row, (q, state) in enumerate(zip(span.q, states, strict=True), span.rows.start):
                out[:, row] = (q @ state).flatten(1, 2).to(out.dtype)
        return out

    def states(self, span: _Span, states_in: Tensor | None) -> Iterator[Tensor]:
        """Yield the state that enters the span, and then the state after each of its tokens."""
        state = self.entering(states_in, span.state_in)
        yield state
        for row, (k, v, decay) in enumerate(zip(span.k, span.v, span.decay, strict=True)):
            state = advance(state, k, v, decay, None if span.beta is None else span.beta[row])
            yield state


class Backward(Forward):
    def __init__(
        self,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: MapOptions,
        states_in: Tensor | None,
    ) -> None:
        _Work.__init__(self, inputs, spans, options)
        self.dout, self.states_in = dout.to(self.expanded.q.dtype), states_in
        self.outgoing = options.empty(inputs, spans.states_in)
        for span in self.each():
            if span.state_in >= 0:
                self.outgoing.state[span.state_in] = self.back(span, None, None)
                if span.state_out >= 0:
                    transition = transposed(self.kind, self.transition(span))
                    self.outgoing.transition[span.state_in] = transition

    def finish(self, dstates_out: Tensor | None) -> Gradients:  # type: ignore[override]
        gradients = Gradients.of(self.expanded, torch.zeros_like)
        for span in self.each():
            self.back(span, dstates_out, gradients)
        return fold(self.inputs, gradients)

    def back(self, span: _Span, dstates_out: Tensor | None, gradients: Gradients | None) -> Tensor:
        """Return the gradient of the state that enters a span. Add gradients of rows to
        `gradients`.

        A *span* is a range of a document's tokens on one rank. Gradients of states are computed
        from the last token to the first. If `gradients` is None, no gradients of rows are computed.
        """
        dstate, dstates = self.entering(dstates_out, span.state_out), []
        dout = self.dout[:, span.rows].transpose(0, 1).unflatten(2, (span.k.shape[2], -1))
        beta = [None] * len(span.k) if span.beta is None else span.beta
        rows = list(zip(span.q, span.k, span.decay, beta, dout, strict=True))
        for q_row, k_row, decay_row, beta_row, dout_row in reversed(rows):
            dstate = dstate + q_row.mT @ dout_row
            dstates.append(dstate)
            if beta_row is not None:
                written = beta_row * read(dstate, k_row)
                dstate = dstate - k_row[..., :, None] * written[..., None, :]
            dstate = decay_row[..., None] * dstate
        if gradients is not None and rows:
            states = torch.stack(list(self.states(span, self.states_in)))
            self.add(span, states, torch.stack(dstates[::-1]), dout, gradients)
        return dstate

    def add(
        self, span: _Span, states: Tensor, dstates: Tensor, dout: Tensor, gradients: Gradients
    ) -> None:
        """Add the gradients of a span's rows to `gradients`, given the gradient of the state after
        each row.
        """
        k, v, decay, beta = span.k, span.v, span.decay, span.beta
        dq = self.options.scale * dout @ states[1:].mT
        decayed = decay[..., None] * states[:-1]
        dv = read(dstates, k)  # the gradient of the value that k added to the state
        dbeta, ddecayed = None, dstates
        if beta is None:
            dk = (dstates * v[..., None, :]).sum(-1)
        else:
            error = v - read(decayed, k)
            dk = (dstates * (beta * error)[..., None, :]).sum(-1)
            dbeta = (dv * error).sum(-1, keepdim=True)
            dv = beta * dv
            dk = dk - (decayed * dv[..., None, :]).sum(-1)
            ddecayed = dstates - k[..., :, None] * dv[..., None, :]
        dlog_decay = (ddecayed * decayed).sum(-1)
        parts = dq.flatten(2, 3), dk, dv, dlog_decay, dbeta
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None and part is not None:
                wide = gradient.shape[-1] == part.shape[-1]
                part = part if wide else part.sum(-1, keepdim=True)
                gradient[:, span.rows] = part.transpose(0, 1)
