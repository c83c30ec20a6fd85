"""The backend "aten" for maps: batched matrix products over chunks of spans, fast on CPUs.

The backend runs on every device that torch supports. A span, which is a range of a document's
tokens on one rank, is cut into chunks of C rows. Let S be the state that enters a chunk. The rows
of the chunk write Y to the state:

    Y = U − W S, where (I + L) [W U] = diag β [K̂ V]   (delta rule; otherwise Y = V)

L is the lower triangle, without the diagonal, of diag β (K Kᵀ ⊙ Λ), where Λ has the decays between
rows. This is the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule"
(2024), section 3.2, with the decays of "Gated Delta Networks" (2025), section 3.3. K̂ and Q̂ =
scale · Q include the decays since the start of the chunk, and K̃ includes the decays until its end.
Then

    out = Q̂ S + (scale · Q Kᵀ ⊙ Λ) Y,    next S = D S + K̃ᵀ Y

where D is the decay over the whole chunk. Only the states are computed one chunk after another.
Backward computes the gradients of states one chunk after another in reverse order, in steps of the
same form:

    dY = (scale · Q Kᵀ ⊙ Λ)ᵀ dout + K̃ dS,    next dS = D dS + Q̂ᵀ dout − Wᵀ dY

`chunk_grid.py` explains the shapes of chunks. Half precision is computed in fp32. No product
combines rows of two spans or of two chunks, so a NaN does not spread between them
(`states/backends/aten.py`).
"""

from __future__ import annotations

from torch import Tensor

from seqpar.linear.inputs import Gradients, Inputs, expanded_gradients, fold
from seqpar.linear.maps.backends.chunk_grid import grids
from seqpar.linear.maps.backends.chunks import ChunkGradients, Chunks, sweep
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.routes import SpanStates

CHUNK = 64  # the largest number of rows of a chunk, a power of two


def request_tables(inputs: Inputs, spans: SpanStates, backward: bool) -> None:
    grids(spans, "state_out" if backward else "state_in", CHUNK, inputs.q.device)


class Forward:
    """The steps of a forward (`Steps` in `linear/attend.py`).

    If no state enters a span, the constructor does all work of the span except the products with
    states.
    """

    def __init__(self, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        self.inputs = inputs
        self.outgoing = options.empty(inputs, spans.states_out)
        self.parts = []
        for grid in grids(spans, "state_in", CHUNK, inputs.q.device):
            part = Chunks(inputs, grid, options)
            self.parts.append(part)
            if not grid.entering:
                part.forward(None)
                grid.leaving.put(self.outgoing.state, part.last)
            elif grid.leaving:
                swept = sweep(grid, part.step(), part.starts(None, grid.entering), keep=False)
                grid.leaving.put(self.outgoing.state, swept.last)
                grid.leaving.put(self.outgoing.transition, part.transition(reverse=False))

    def local(self) -> None:
        for part in self.parts:
            part.read()

    def finish(self, states_in: Tensor | None) -> Tensor:
        out = self.inputs.q.new_empty(self.inputs.out_shape)
        for part in self.parts:
            part.read()
            if part.grid.entering:
                part.forward(states_in)
            part.grid.join(part.out(), out, self.inputs.heads)
        return out


class Backward:
    """The steps of a backward (`Steps` in `linear/attend.py`).

    If no gradient reaches the state that leaves a span, the constructor does all work of the span
    that depends on states.
    """

    def __init__(
        self,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: MapOptions,
        states_in: Tensor | None,
    ) -> None:
        self.inputs = inputs
        self.outgoing = options.empty(inputs, spans.states_in)
        self.parts = []
        for grid in grids(spans, "state_out", CHUNK, inputs.q.device):
            part = ChunkGradients(inputs, grid, options, dout, states_in)
            self.parts.append(part)
            if not grid.leaving:
                part.backward(None)
                grid.entering.put(self.outgoing.state, part.dlast)
            elif grid.entering:
                starts = part.starts(None, grid.leaving)
                swept = sweep(grid, part.step_back(), starts, reverse=True, keep=False)
                grid.entering.put(self.outgoing.state, swept.last)
                grid.entering.put(self.outgoing.transition, part.transition(reverse=True))

    def local(self) -> None:
        for part in self.parts:
            part.local()

    def finish(self, dstates_out: Tensor | None) -> Gradients:
        gradients = expanded_gradients(self.inputs)
        for part in self.parts:
            if part.grid.leaving:
                part.backward(dstates_out)
            part.finish(gradients)
        return fold(self.inputs, gradients)
