"""The recurrence over spans in batched matrix products, chunk by chunk: fast on CPUs.

It runs on every device that torch has. Of a chunk of C rows, which the state S enters, the rows
write Y to the state:

    Y = U − W S, where (I + L) [W U] = diag β [K̂ V]   (delta rule; otherwise Y = V)

L is the part of diag β (K Kᵀ ⊙ Λ) below the diagonal: the WY form of Yang et al., "Parallelizing
Linear Transformers with the Delta Rule" (2024), section 3.2, with the decays of "Gated Delta
Networks" (2025), section 3.3. Λ has the decays between rows, K̂ and Q̂ = scale · Q those since the
chunk's start, and K̃ those until its end. So

    out = Q̂ S + (scale · Q Kᵀ ⊙ Λ) Y,    next S = D S + K̃ᵀ Y

and only the states go chunk by chunk. In backward they do so in reverse, in steps of the same form:

    dY = (scale · Q Kᵀ ⊙ Λ)ᵀ dout + K̃ dS,    next dS = D dS + Q̂ᵀ dout − Wᵀ dY

`grid` has the shapes of chunks. Half precision is computed in fp32. No product has rows of two
spans, nor of two chunks, as in linear attention's backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.dtypes import accumulator_dtype
from seqpar.linear.spans import SpanStates
from seqpar.recurrent.backends.grid import Grid, grids
from seqpar.recurrent.backends.per_head import PerHead, PerHeadGradients
from seqpar.recurrent.backends.per_key import PerKey, PerKeyGradients
from seqpar.recurrent.backends.sweep import Decay, Step, last_states, sweep
from seqpar.recurrent.heads import expanded_gradients, fold
from seqpar.recurrent.inputs import Gradients, Inputs, RecurrentOptions
from seqpar.recurrent.kinds.kind import Kind
from seqpar.recurrent.maps import Maps, empty_maps

CHUNK = 64  # rows of a chunk at most, a power of two


class _Chunks:
    """The chunks of a grid's spans, and what their rows write to states."""

    def __init__(self, kind: Kind, inputs: Inputs, grid: Grid, options: RecurrentOptions) -> None:
        self.kind, self.inputs, self.grid, self.options = kind, inputs, grid, options
        self.dtype, heads = accumulator_dtype(inputs.q.dtype), inputs.heads
        self.k, self.v = (self.cut(x)[:, :, 0] for x in (inputs.k, inputs.v))
        self.powers = self._powers()
        self.beta: Tensor | None = None  # (M, N, C, 1)
        self.erases: Tensor | None = None  # −W
        self.writers, self.rows = self.powers.write(self.k), self.v  # K̃; U, or without W: V
        if inputs.beta is not None:
            self.beta = self.cut(inputs.beta[..., None])[:, :, 0]
            keys = self.k[:, :, None]
            self.overlaps = self.powers.scores(keys, self.k)
            self.readers = self.powers.read(keys)[:, :, 0]  # K̂
            self.solved = self.solve(torch.cat([self.readers, self.v], -1).mul_(self.beta))
            self.erases = self.solved[..., : self.k.shape[-1]].neg()
            self.rows = self.solved[..., self.k.shape[-1] :]
        self.q: Tensor | None = None  # until `read`
        self.shape = inputs.state_shape[0] * heads, *inputs.state_shape[2:]  # (N, K, V)
        total = self.powers.total
        self.decay = None if total is None else Decay.of(total, self.dtype)

    def cut(self, x: Tensor) -> Tensor:
        """Return the chunks of x (B, T, h, D): (M, N, G, C, D)."""
        return self.grid.cut(x, self.inputs.heads, self.dtype)

    def _powers(self) -> PerHead | PerKey:
        log_decay, size = self.inputs.log_decay, self.grid.size
        if log_decay is None:
            return PerHead(None, size)
        if self.kind.decay == "key":
            return PerKey(self.cut(log_decay)[:, :, 0], size)
        each = log_decay.expand(*self.inputs.q.shape[:2], self.inputs.heads)
        return PerHead(self.cut(each[..., None])[:, :, 0, :, 0], size)

    def solve(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Return (I + L)⁻¹ x, or with the transpose."""
        assert self.beta is not None
        lower = self.overlaps[:, :, 0] * self.beta  # its diagonal is not read
        lower = lower.mT if transposed else lower
        return torch.linalg.solve_triangular(lower, x, upper=transposed, unitriangular=True)

    def read(self) -> None:
        """Compute what rows read of each other, and as what they read states."""
        if self.q is None:
            self.q = self.cut(self.inputs.q).mul_(self.options.scale)
            self.scores = self.powers.scores(self.q, self.k)  # (M, N, G, C, C)
            self.queries = self.powers.read(self.q).flatten(2, 3)  # Q̂ (M, N, G · C, K)

    def starts(self, states: Tensor | None, which: tuple[Tensor, Tensor]) -> Tensor:
        """Return `states` at the grid's spans, as `which` has it, and otherwise 0."""
        starts = self.k.new_zeros((self.grid.spans, *self.shape))
        if states is not None:
            found = states.flatten(1, 2).index_select(0, which[1])
            starts.index_copy_(0, which[0], found)
        return starts

    def forward_step(self) -> Step:
        """Return what each chunk does to a state."""
        if self.erases is None:
            return Step(self.decay, added=self.writers.mT @ self.rows)
        return Step(self.decay, self.erases, self.writers.mT, self.rows)

    def forward(self, states: Tensor | None) -> None:
        """Pass states from chunk to chunk, given those that enter spans."""
        swept = sweep(self.grid, self.forward_step(), self.starts(states, self.grid.entering))
        self.swept = swept if swept.rows is not None else swept._replace(rows=self.rows)

    def transition(self, reverse: bool) -> Tensor:
        """Return the transitions of spans, with `reverse` transposed: (spans, N[, K[, K]])."""
        if self.erases is None:
            return self._product_of_decays()
        dim = self.shape[1]
        eye = torch.eye(dim, dtype=self.dtype, device=self.k.device)
        states = eye.expand(self.grid.spans, self.shape[0], dim, dim)
        step = Step(self.decay, self.erases, self.writers.mT)
        if reverse:
            step = Step(self.decay, self.writers, self.erases.mT)
        return last_states(self.grid, step, states, reverse)

    def _product_of_decays(self) -> Tensor:
        per_key = self.kind.transition == "key"
        shape = self.grid.spans, self.shape[0], self.shape[1] if per_key else 1
        logs = self.k.new_zeros(shape, dtype=torch.float64)
        if self.powers.total is not None:
            for chunks in self.grid.steps:
                logs[: chunks.stop - chunks.start] += self.powers.total[chunks]
        return logs.exp().to(self.dtype).view(shape if per_key else shape[:2])


def _put(maps: Maps, which: tuple[Tensor, Tensor], state: Tensor, transition: Tensor | None) -> None:
    """Set the maps of a grid's spans, as `which` has it."""
    spans, indices = which
    for target, x in ((maps.state, state), (maps.transition, transition)):
        if x is not None:
            found = x.index_select(0, spans).view(-1, *target.shape[1:])
            target.index_copy_(0, indices, found)


class Forward:
    """The forward in steps; see `ForwardSteps` in `seqpar.recurrent.attend`."""

    def __init__(
        self, kind: Kind, inputs: Inputs, spans: SpanStates, options: RecurrentOptions
    ) -> None:
        self.inputs = inputs
        self.maps = empty_maps(kind, inputs, spans.states_out)
        self.parts = []
        for grid in grids(spans, "state_in", CHUNK, inputs.q.device):
            part = _Chunks(kind, inputs, grid, options)
            self.parts.append(part)
            enters, leaves = (x[0].numel() > 0 for x in (grid.entering, grid.leaving))
            if not enters:
                part.forward(None)
                _put(self.maps, grid.leaving, part.swept.last, None)
            elif leaves:
                last = last_states(grid, part.forward_step(), part.starts(None, grid.entering))
                _put(self.maps, grid.leaving, last, part.transition(reverse=False))

    def local(self) -> None:
        for part in self.parts:
            part.read()

    def finish(self, states_in: Tensor | None) -> Tensor:
        self.local()
        out = self.inputs.q.new_empty(self.inputs.out_shape)
        for part in self.parts:
            if part.grid.entering[0].numel():
                part.forward(states_in)
            swept = part.swept
            found = part.scores.flatten(2, 3) @ swept.rows
            found += part.queries @ swept.states
            part.grid.join(found.unflatten(2, part.scores.shape[2:4]), out)
        return out


class _BackwardChunks(_Chunks):
    """Chunks with the gradients of what rows of out have read."""

    def __init__(
        self,
        kind: Kind,
        inputs: Inputs,
        grid: Grid,
        options: RecurrentOptions,
        dout: Tensor,
        states_in: Tensor | None,
    ) -> None:
        super().__init__(kind, inputs, grid, options)
        self.read()
        self.forward(states_in)
        self.dout = self.cut(dout).flatten(2, 3)  # (M, N, G · C, V)
        self.drows = self.scores.flatten(2, 3).mT @ self.dout
        self.added = self.queries.mT @ self.dout
        self.gradients: PerHeadGradients | PerKeyGradients | None = None  # until `local`

    def backward_step(self) -> Step:
        """Return what each chunk does to the gradient of a state."""
        if self.erases is None:
            return Step(self.decay, added=self.added)
        return Step(self.decay, self.writers, self.erases.mT, self.drows, self.added)

    def backward(self, dstates: Tensor | None) -> None:
        """Pass gradients of states from chunk to chunk, given those of the states that leave."""
        starts = self.starts(dstates, self.grid.leaving)
        swept = sweep(self.grid, self.backward_step(), starts, reverse=True)
        drows = swept.rows
        if drows is None:
            drows = self.drows + self.writers @ swept.states
        self.dswept = swept._replace(rows=drows)

    def local(self) -> None:
        """Compute the gradients of q, and what k gets from rows that read it."""
        if self.gradients is None:
            powers = self.powers
            self.gradients = (
                PerHeadGradients(powers) if isinstance(powers, PerHead) else PerKeyGradients(powers)
            )
            dscores = (self.dout @ self.swept.rows.mT).view(self.scores.shape)
            dqueries = (self.dout @ self.swept.states.mT).view(self.q.shape)
            dq, self.dk = self.gradients.scores(self.q, self.k, self.scores, dscores)
            self.dq = (dq + self.gradients.read(self.q, dqueries)).mul_(self.options.scale)

    def finish(self, gradients: Gradients) -> None:
        """Set the rows of the gradients."""
        self.local()
        found, dk, swept, dswept = self.gradients, self.dk, self.swept, self.dswept
        dk += found.write(self.k, swept.rows @ dswept.states.mT)
        found.state((swept.states * dswept.states).sum(-1))
        dv = dswept.rows
        if self.beta is not None:
            dsolved = torch.cat([dswept.rows @ swept.states.mT.neg(), dswept.rows], -1)
            dsolved = self.solve(dsolved, transposed=True)
            dlower = (dsolved @ self.solved.mT).neg_().tril_(-1)
            dim = self.k.shape[-1]
            targets = torch.cat([self.readers, self.v], -1)
            dbeta = (dsolved * targets).sum(-1, keepdim=True)
            dbeta += (dlower * self.overlaps[:, :, 0]).sum(-1, keepdim=True)
            self.grid.join(dbeta[:, :, None], gradients.beta)
            dsolved *= self.beta
            dv, keys = dsolved[..., dim:], self.k[:, :, None]
            doverlaps = (dlower * self.beta)[:, :, None]
            dreaders, dkeys = found.scores(keys, self.k, self.overlaps, doverlaps)
            dreaders += found.read(keys, dsolved[:, :, None, :, :dim])
            dk = dk + dkeys + dreaders[:, :, 0]
        self.grid.join(self.dq, gradients.q)
        self.grid.join(dk[:, :, None], gradients.k)
        self.grid.join(dv[:, :, None], gradients.v)
        dlog_decay = found.log_decay()
        if dlog_decay is not None:
            wide = dlog_decay if dlog_decay.dim() == 4 else dlog_decay[..., None]
            self.grid.join(wide[:, :, None], gradients.log_decay)


class Backward:
    """The backward in steps; see `BackwardSteps` in `seqpar.recurrent.attend`."""

    def __init__(
        self,
        kind: Kind,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: RecurrentOptions,
        states_in: Tensor | None,
    ) -> None:
        self.inputs = inputs
        self.maps = empty_maps(kind, inputs, spans.states_in)
        self.parts = []
        for grid in grids(spans, "state_out", CHUNK, inputs.q.device):
            part = _BackwardChunks(kind, inputs, grid, options, dout, states_in)
            self.parts.append(part)
            enters, leaves = (x[0].numel() > 0 for x in (grid.entering, grid.leaving))
            if not leaves:
                part.backward(None)
                _put(self.maps, grid.entering, part.dswept.last, None)
            elif enters:
                starts = part.starts(None, grid.leaving)
                last = last_states(grid, part.backward_step(), starts, reverse=True)
                _put(self.maps, grid.entering, last, part.transition(reverse=True))

    def local(self) -> None:
        for part in self.parts:
            part.local()

    def finish(self, dstates_out: Tensor | None) -> Gradients:
        gradients = expanded_gradients(self.inputs)
        for part in self.parts:
            if part.grid.leaving[0].numel():
                part.backward(dstates_out)
            part.finish(gradients)
        return fold(self.inputs, gradients)
