"""The backend "aten" for states: batched matrix products over chunks of spans, fast on CPUs.

The backend runs on every device that torch supports. A *span* is a range of consecutive tokens of a
document on one rank. As in Qin et al., "Lightning Attention-2" (2024), section 3, spans are cut
into chunks of C rows. The output of a row is a sum of two parts. Rows of the same chunk contribute
(QKᵀ ⊙ Λ) V. Rows of earlier chunks of the span contribute through the state that enters the chunk.
States are passed from chunk to chunk in fp64, because rounding errors of λ^C would add up. Half
precision is computed in fp32.

A matrix product never combines rows of two documents or rows of two chunks. A NaN or an infinity in
a token therefore reaches only two kinds of rows: rows that attend to the token, and earlier rows of
its chunk, because 0 · NaN is NaN.

The queries of a chunk are (N, G·C, D), with N = B·Hkv for batch B and Hkv KV heads. G query heads
share a KV head. Along the second dimension, the C rows of the first query head come first. Keys and
values are (N, C, D). States are (n, B, Hkv, D, Dv) as arguments and results, and (N, D, Dv) within
this file.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import kept_on
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.core.ranges import count_up
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions

CHUNK = 128  # the largest number of rows of a chunk; for head dims up to 64, 64 rows are faster


class Chunk(NamedTuple):
    rows: slice
    span: int
    first: bool  # whether it is the first chunk of its span
    last: bool
    since: int  # how many rows lie between the start of the span and the chunk
    until: int  # how many rows lie between the chunk and the end of the span
    length: int  # C, its number of rows


def chunks_of(spans: SpanStates, size: int) -> list[Chunk]:
    """Return the chunks of all spans, with at most `size` rows each. `spans` stores the chunks."""
    return spans.derived(("aten chunks", size), lambda: _chunks(spans, size))


def rows_of_chunks(spans: SpanStates, size: int, device: torch.device) -> Tensor:
    """Return a tensor (3, chunks) with the fields `length`, `since` and `until` of each chunk."""

    def build() -> Tensor:
        rows = [(x.length, x.since, x.until) for x in chunks_of(spans, size)]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).T.contiguous()

    return kept_on(device, spans.derived, ("rows of aten chunks", size), build)


def request_tables(inputs: Inputs, spans: SpanStates, backward: bool) -> None:
    rows_of_chunks(spans, _chunk_size(inputs), inputs.q.device)


def _chunk_size(inputs: Inputs) -> int:
    return min(CHUNK, 64 if max(inputs.q.shape[3], inputs.v.shape[3]) <= 64 else 128)


def _chunks(spans: SpanStates, size: int) -> list[Chunk]:
    count = -(-np.diff(spans.edges) // size)
    span = np.repeat(np.arange(count.size), count)
    first, last = spans.edges[span], spans.edges[span + 1]
    start = first + size * count_up(count)
    stop = np.minimum(start + size, last)
    columns = [span, start == first, stop == last, start - first, last - stop, stop - start]
    rows = map(slice, start.tolist(), stop.tolist())
    return list(map(Chunk, rows, *(x.tolist() for x in columns)))


class _Work:
    """The base class of forward and backward. It computes chunks, powers of λ, and the states that
    enter chunks.
    """

    def __init__(self, inputs: Inputs, spans: SpanStates, options: StateOptions) -> None:
        self.q, self.k, self.v = inputs[:3]
        q, k = self.q, self.k
        self.spans, self.options = spans, options
        self.accumulator = accumulator_dtype(q.dtype)
        self.batch, self.heads, self.causal = q.shape[0], k.shape[2], options.causal
        self.group = q.shape[2] // self.heads
        size = _chunk_size(inputs)
        self.chunks = chunks_of(spans, size)
        lengths, since, until = rows_of_chunks(spans, size, q.device)
        # The decay λ^C over each chunk, (chunks, N, 1, 1), in fp64.
        self._decays = options.power(lengths, self.heads).repeat(1, self.batch)[..., None, None]
        self._since, self._until = self.power(since), self.power(until)  # (N, chunks)
        self._derived = Memo()  # powers of λ within a chunk, by the length of the chunk
        i = torch.arange(size + 1, device=q.device)
        self._powers = self.power(i)  # (N, C + 1)
        # (N, C, C)
        self._mask = self.power(i[:-1, None] - i[:-1]) * options.scale if self.causal else None

    def power(self, exponents: Tensor) -> Tensor:
        """Return λ^exponent, (N, …), and 0 for negative exponents.

        In fp32, powers below about 1e-31 are also set to 0, because products with these powers
        would be subnormal numbers. On a CPU, a matrix product of subnormal numbers takes twenty
        times as long as a product of normal numbers.
        """
        powers = self.options.power(exponents, self.heads).movedim(-1, 0).to(self.accumulator)
        limits = torch.finfo(self.accumulator)
        return powers.where(powers > limits.tiny / limits.eps, 0).repeat(
            self.batch, *[1] * exponents.dim()
        )

    def head(self, length: int) -> Tensor:
        """Return the factors of query rows in products with the state that enters their chunk,
        (N, G·C, 1).

        The factor of row i is scale · λ^{i+1}.
        """
        return self._derived(
            ("head", length),
            lambda: (
                self._powers[:, 1 : length + 1, None].repeat(1, self.group, 1) * self.options.scale
            ),
        )

    def tail(self, length: int) -> Tensor:
        """Return the factors of key rows in the state that leaves their chunk, (N, C, 1).

        The factor of row i is λ^{C−1−i}.
        """
        return self._derived(("tail", length), lambda: self._powers[:, :length].flip(1)[..., None])

    def mask(self, length: int) -> Tensor:
        """Return the factors of the scores within a chunk, (N, G·C, C).

        The factor of query row i and key row j is scale · λ^{i−j}, or 0 if j > i.
        """

        def build() -> Tensor:
            assert self._mask is not None
            return self._mask[:, :length, :length].repeat(1, self.group, 1)

        return self._derived(("mask", length), build)

    def part(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return the rows of a chunk from x (B, T, H, D), as (N, G·C, D). The result is a view of x
        if possible, and a copy if not.
        """
        heads_first = x[:, chunk.rows].unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1, 4)
        return heads_first.flatten(0, 1).flatten(1, 2).to(self.accumulator)

    def put(self, target: Tensor, part: Tensor, chunk: Chunk, add: bool = False) -> None:
        """Write the chunk `part` (N, G·C, D) to its rows of `target` (B, T, H, D).

        With `add`, the chunk is added to these rows of `target`.
        """
        view = target[:, chunk.rows].unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1, 4)
        rows = part.view(view.shape)
        view.add_(rows) if add else view.copy_(rows)

    def sweep(self, x: Tensor, y: Tensor, wanted: Ints, reverse: bool) -> tuple[Tensor, Tensor]:
        """Return sums of products xᵀy over rows, with decay: a sum for each chunk, and sums for
        spans.

        A *span* is a range of a document's tokens on one rank, which is cut into chunks of rows.
        The sum for a chunk, (N, D, Dv), is over those rows of its span that come before the chunk.
        The sum for a span is over all rows of the span. `wanted` (spans,) has, for each span, the
        index of its sum among the returned sums of spans, or −1 if its sum is not wanted.

        With `reverse`, the sum for a chunk is over those rows of its span that come after the
        chunk, and the sum for a span is the contribution of its rows to the gradient of the state
        that enters the span.
        """
        shape = self.batch, self.heads, x.shape[3], y.shape[3]
        states = x.new_zeros((int((wanted >= 0).sum()), *shape), dtype=self.accumulator)
        carried = x.new_zeros((self.batch * self.heads, *shape[2:]), dtype=torch.float64)
        sums = x.new_empty((len(self.chunks), *carried.shape), dtype=self.accumulator)
        weights_of = self.head if reverse else self.tail
        for number in reversed(range(len(sums))) if reverse else range(len(sums)):
            chunk = self.chunks[number]
            begins, ends = (chunk.last, chunk.first) if reverse else (chunk.first, chunk.last)
            if begins:
                carried.zero_()
            sums[number] = carried
            state = int(wanted[chunk.span])
            if ends and state < 0:
                continue
            part = self.part(x, chunk) * weights_of(chunk.length)
            carried.mul_(self._decays[number]).add_(part.mT @ self.part(y, chunk))
            if ends:
                states[state] = carried.view(shape)
        return sums, states

    def entering(
        self, number: int, chunk: Chunk, inner: Tensor, outer: Tensor | None, reverse: bool
    ) -> Tensor:
        """Return the state that enters a chunk of rows of a span, (N, D, Dv).

        The returned state is the sum of two states. The first state comes from earlier rows of the
        span, and is in `inner`. The second state is the state that enters the span, from `outer`,
        decayed over the rows before the chunk. With `reverse`, the result is a gradient: `inner`
        has the gradients that come from later rows of the span, and `outer` has the gradients of
        the states that leave spans.
        """
        index = int((self.spans.state_out if reverse else self.spans.state_in)[chunk.span])
        if outer is None or index < 0:
            return inner[number]
        state = outer[index].flatten(0, 1)
        if not self.causal:
            return state
        powers = self._until if reverse else self._since
        return inner[number] + powers[:, number, None, None] * state


class Forward(_Work):
    def __init__(self, inputs: Inputs, spans: SpanStates, options: StateOptions) -> None:
        super().__init__(inputs, spans, options)
        self.inner, self.outgoing = self.sweep(self.k, self.v, spans.state_out, reverse=False)
        self.out: Tensor | None = None

    def local(self) -> None:
        if self.causal:
            shape = *self.q.shape[:3], self.v.shape[3]
            self.out = self.q.new_empty(shape, dtype=self.accumulator)
            for chunk in self.chunks:
                self.put(self.out, self.within(chunk), chunk)

    def finish(self, initial: Tensor | None) -> Tensor:
        out = self.out
        if out is None:
            out = self.q.new_empty((*self.q.shape[:3], self.v.shape[3]))
        for number, chunk in enumerate(self.chunks):
            q = self.part(self.q, chunk) * self.head(chunk.length)
            state = self.entering(number, chunk, self.inner, initial, reverse=False)
            if self.causal and self.out is None:
                self.put(out, torch.baddbmm(self.within(chunk), q, state), chunk)
            else:
                self.put(out, q @ state, chunk, add=self.out is not None)
        return out.to(self.q.dtype)

    def within(self, chunk: Chunk) -> Tensor:
        """Return what the keys and values of a chunk contribute to the outputs of the same chunk,
        (N, G·C, Dv).
        """
        q, k, v = (self.part(x, chunk) for x in (self.q, self.k, self.v))
        return (q @ k.mT).mul_(self.mask(chunk.length)) @ v


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
        self.inner, self.outgoing = self.sweep(self.q, dout, spans.state_in, reverse=True)
        self.gradients: list[Tensor] | None = None

    def local(self) -> None:
        self.gradients = self._empty()
        for number, chunk in enumerate(self.chunks):
            for gradient, part in zip(self.gradients, self.within(number, chunk), strict=True):
                self.put(gradient, part, chunk)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.gradients or self._empty()
        for number, chunk in enumerate(self.chunks):
            state = self.entering(number, chunk, self.inner, dfinal, reverse=True)
            k, v = (self.part(x, chunk) for x in (self.k, self.v))
            tail = self.tail(chunk.length)
            dk_part, dv_part = (v * tail) @ state.mT, (k * tail) @ state
            if self.gradients is None:
                dq_part, dk_within, dv_within = self.within(number, chunk)
                self.put(dq, dq_part, chunk)
                dk_part, dv_part = dk_part.add_(dk_within), dv_part.add_(dv_within)
            self.put(dk, dk_part, chunk, add=self.gradients is not None)
            self.put(dv, dv_part, chunk, add=self.gradients is not None)
        return dq, dk, dv

    def within(self, number: int, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq of a chunk, and what the queries of the chunk contribute to the dk and dv of
        the chunk.
        """
        q, k, v, dout = (self.part(x, chunk) for x in (self.q, self.k, self.v, self.dout))
        state = self.entering(number, chunk, self.before, self.initial, reverse=False)
        dq = (dout * self.head(chunk.length)) @ state.mT
        if not self.causal:
            return dq, torch.zeros_like(k), torch.zeros_like(v)
        mask = self.mask(chunk.length)
        score, dscore = (q @ k.mT).mul_(mask), (dout @ v.mT).mul_(mask)
        return dq.baddbmm_(dscore, k), dscore.mT @ q, score.mT @ dout

    @cached_property
    def before(self) -> Tensor:
        """The sum of the span's earlier rows before each chunk, as in forward, without the state
        that enters the span.
        """
        if not self.causal:
            # Without causality, this is the sum over the whole document that entered.
            return self.inner[:0]
        no_states = np.full_like(self.spans.state_out, -1)
        return self.sweep(self.k, self.v, no_states, reverse=False)[0]

    def _empty(self) -> list[Tensor]:
        return [x.new_empty(x.shape, dtype=self.accumulator) for x in (self.q, self.k, self.v)]
