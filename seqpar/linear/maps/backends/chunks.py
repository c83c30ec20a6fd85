"""Compute chunks of rows, through which states pass, in the notation of `aten.py`.

A span, which is a range of a document's tokens on one rank, is cut into chunks. States pass from
chunk to chunk, for all spans at once. States between chunks are in fp64. In fp32, the product of a
state and a decay close to 1 would be rounded in the same direction in each chunk, and the errors
would add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Gradients, Inputs
from seqpar.linear.maps.backends.chunk_grid import Grid, Places
from seqpar.linear.maps.backends.decays import PerHead, PerHeadGradients, PerKey, PerKeyGradients
from seqpar.linear.maps.map_options import MapOptions


class ChunkStep(NamedTuple):
    """The factors of the step that computes a chunk from the state S that enters the chunk.

        Y = rows + reads S
        next S = D S + added + writes Y

    If a tensor is None, its term is left out.
    """

    decay: Tensor | None  # log D (M, N, K or 1), in fp64
    added: Tensor | None = None  # (M, N, K, V)
    rows: Tensor | None = None  # (M, N, C, V)
    reads: Tensor | None = None  # (M, N, C, K)
    writes: Tensor | None = None  # (M, N, K, C)


class Swept(NamedTuple):
    states: Tensor  # the states before each chunk (M, N, K, V)
    rows: Tensor | None  # Y of each chunk
    last: Tensor  # (spans, N, K, V)


def sweep(
    grid: Grid,
    step: ChunkStep,
    states: Tensor,
    reverse: bool = False,
    keep: bool = True,
    least: float = 0.0,
) -> Swept:
    """Pass the states of spans, (spans, N, K, V), through the chunks of the spans.

    A *span* is a range of a document's tokens on one rank, which is cut into chunks of rows. With
    `reverse`, the last chunk of a span comes first. With `keep`, the result also has the state
    before each chunk. After each chunk, elements of states with an absolute value of at most
    `least` are set to 0.
    """
    before = states.new_empty((grid.chunks if keep else 0, *states.shape[1:]))
    rows = None
    if keep and step.rows is not None:
        rows = torch.empty_like(step.rows, memory_format=torch.contiguous_format)
    last = states.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    factors = None if step.decay is None else step.decay.exp()[..., None]
    for chunks in reversed(grid.steps) if reverse else grid.steps:
        carried = last[: chunks.stop - chunks.start]
        state = before[chunks].copy_(carried) if keep else carried.to(states.dtype, copy=True)
        if factors is not None:
            carried *= factors[chunks]
        if step.added is not None:
            carried += step.added[chunks]
        if step.reads is not None and step.writes is not None:
            into = None if rows is None else rows[chunks]
            read = _read(step.reads[chunks], state, step.rows, chunks, into)
            carried += step.writes[chunks] @ read
        if least:
            carried.copy_(hardshrink(carried, least))
    return Swept(before, rows, last.to(states.dtype))


def _read(
    reads: Tensor, state: Tensor, rows: Tensor | None, chunks: slice, into: Tensor | None
) -> Tensor:
    """Return rows + reads · S for some chunks, where S is `state`.

    If `rows` is None, the result is reads · S. If `into` is given, the sum is written to `into`.
    """
    if rows is None:
        return reads @ state
    if into is None:
        into = torch.empty_like(rows[chunks], memory_format=torch.contiguous_format)
    factors = (x.flatten(0, 1) for x in (rows[chunks], reads, state))
    torch.baddbmm(*factors, out=into.flatten(0, 1))
    return into


class Chunks:
    """The chunks of the spans of a grid, and what the rows of each chunk write to the state."""

    # The next tensors exist only with the delta rule.
    beta: Tensor  # (M, N, C, 1)
    overlaps: Tensor  # K Kᵀ ⊙ Λ (M, N, 1, C, C)
    readers: Tensor  # K̂ (M, N, C, K)
    solved: Tensor  # W and U, side by side
    erases: Tensor  # −W (M, N, C, K)
    _added: Tensor | None  # what rows add to states; kept from the sweep for maps until `forward`

    def __init__(self, inputs: Inputs, grid: Grid, options: MapOptions) -> None:
        self.kind, self.inputs, self.grid, self.options = options.kind, inputs, grid, options
        self.dtype, self.heads = accumulator_dtype(inputs.q.dtype), inputs.heads
        self.shape = inputs.state_shape[0] * self.heads, *inputs.state_shape[2:]  # (N, K, V)
        # (M, N, C, K) and (M, N, C, V)
        self.k, self.v = (self.cut(x)[:, :, 0] for x in (inputs.k, inputs.v))
        self.powers = self._powers()
        self.writers = self.powers.write(self.k)  # K̃ (M, N, C, K)
        self.rows = self.v  # U (M, N, C, V), which is v without the delta rule
        if inputs.beta is not None:
            self._erase(inputs.beta)
        self._has_read, self._added = False, None

    def cut(self, x: Tensor) -> Tensor:
        return self.grid.cut(x, self.heads, self.dtype)

    def _powers(self) -> PerHead | PerKey:
        log_decay, size = self.inputs.log_decay, self.grid.size
        if log_decay is None:
            return PerHead(None, size)
        if self.kind.decay == "key":
            return PerKey(self.cut(log_decay)[:, :, 0], size)
        each = log_decay.expand(*self.inputs.q.shape[:2], self.heads)
        return PerHead(self.cut(each[..., None])[:, :, 0, :, 0], size)

    def _erase(self, beta: Tensor) -> None:
        self.beta = self.cut(beta[..., None])[:, :, 0]
        keys, dim = self.k[:, :, None], self.k.shape[-1]
        self.overlaps = self.powers.scores(keys, self.k)
        self.readers = self.powers.read(keys)[:, :, 0]
        self.solved = self.solve(torch.cat([self.readers, self.v], -1).mul_(self.beta))
        self.erases, self.rows = self.solved[..., :dim].neg(), self.solved[..., dim:]

    def solve(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Return (I + L)⁻¹ x or, if `transposed`, (I + L)⁻ᵀ x."""
        lower = self.overlaps[:, :, 0] * self.beta  # the diagonal is not read
        lower = lower.mT if transposed else lower
        return torch.linalg.solve_triangular(lower, x, upper=transposed, unitriangular=True)

    def read(self) -> None:
        """Compute the scores between the rows of each chunk, and the queries as they are multiplied
        with states.

        A second call does nothing.
        """
        if not self._has_read:
            self._has_read = True
            self.q = self.cut(self.inputs.q).mul_(self.options.scale)  # (M, N, G, C, K)
            self.scores = self.powers.scores(self.q, self.k)  # (M, N, G, C, C)
            # Q̂ (M, N, G · C, K)
            self.queries = self.powers.read(self.q).flatten(2, 3)

    def starts(self, states: Tensor | None, places: Places) -> Tensor:
        """Return the state that each span of the grid starts with, from `states` (n, B, H, K, V).

        `places` says which spans have a state in `states`. All other spans start with 0.
        """
        return places.fill(self.k.new_zeros((self.grid.spans, *self.shape)), states)

    def step(self) -> ChunkStep:
        if self.kind.uses_beta:
            return ChunkStep(self.powers.total, None, self.rows, self.erases, self.writers.mT)
        if self._added is None:
            self._added = self.writers.mT @ self.rows
        return ChunkStep(self.powers.total, self._added)

    def forward(self, states: Tensor | None) -> None:
        """Pass the states that enter spans through the chunks.

        This sets three attributes: `states` (before each chunk), `written` (Y of each chunk), and
        `last` (the states that leave spans).
        """
        swept = sweep(self.grid, self.step(), self.starts(states, self.grid.entering))
        self._added = None
        self.states, self.last = swept.states, swept.last
        self.written = self.rows if swept.rows is None else swept.rows

    def out(self) -> Tensor:
        out = self.scores.flatten(2, 3) @ self.written
        out += self.queries @ self.states
        return out.unflatten(2, self.scores.shape[2:4])

    def transition(self, reverse: bool) -> Tensor:
        """Return the transitions of spans, (spans, N[, K[, K]]). With `reverse`, return their
        transposes.
        """
        if not self.kind.uses_beta:
            return self._product_of_decays()
        count, dim = self.shape[:2]
        eye = torch.eye(dim, dtype=self.dtype, device=self.k.device)
        states = eye.expand(self.grid.spans, count, dim, dim)
        maps = (self.writers, self.erases.mT) if reverse else (self.erases, self.writers.mT)
        step = ChunkStep(self.powers.total, None, None, *maps)
        # Products of decays soon become subnormal numbers, with which CPUs compute slowly.
        least = torch.finfo(self.dtype).tiny / torch.finfo(self.dtype).eps
        return sweep(self.grid, step, states, reverse, keep=False, least=least).last

    def _product_of_decays(self) -> Tensor:
        per_key = self.kind.transition == "key"
        shape = self.grid.spans, self.shape[0], self.shape[1] if per_key else 1
        logs = self.k.new_zeros(shape, dtype=torch.float64)
        if self.powers.total is not None:
            for chunks in self.grid.steps:
                logs[: chunks.stop - chunks.start] += self.powers.total[chunks]
        return logs.exp().to(self.dtype).view(shape if per_key else shape[:2])


class ChunkGradients(Chunks):
    """The backward of `Chunks`.

    Gradients of states pass through the chunks in reverse order. All gradients are computed by
    formulas, because torch runs an operator's implementation without autograd.
    """

    def __init__(
        self,
        inputs: Inputs,
        grid: Grid,
        options: MapOptions,
        dout: Tensor,
        states_in: Tensor | None,
    ) -> None:
        super().__init__(inputs, grid, options)
        self.read()
        self.forward(states_in)
        self.dout = self.cut(dout).flatten(2, 3)  # (M, N, G · C, V)
        self.drows = self.scores.flatten(2, 3).mT @ self.dout
        self.added = self.queries.mT @ self.dout
        powers = self.powers
        self.gradients = (
            PerHeadGradients(powers) if isinstance(powers, PerHead) else PerKeyGradients(powers)
        )
        self._has_local = False

    def step_back(self) -> ChunkStep:
        if self.kind.uses_beta:
            return ChunkStep(
                self.powers.total, self.added, self.drows, self.writers, self.erases.mT
            )
        return ChunkStep(self.powers.total, self.added)

    def backward(self, dstates: Tensor | None) -> None:
        """Pass the gradients of the states that leave spans back through the chunks.

        A *span* is a range of a document's tokens on one rank, which is cut into chunks. This
        method sets three attributes. `dstates` is the gradient of the states that leave chunks,
        `dwritten` is the gradient of Y, and `dlast` is the gradient of the states that enter spans.
        """
        starts = self.starts(dstates, self.grid.leaving)
        swept = sweep(self.grid, self.step_back(), starts, reverse=True)
        self.dstates, self.dlast = swept.states, swept.last
        self.dwritten = (
            self.drows + self.writers @ self.dstates if swept.rows is None else swept.rows
        )

    def local(self) -> None:
        """Compute the gradient of q, and what the scores within each chunk contribute to the
        gradient of k.

        A second call does nothing.
        """
        if not self._has_local:
            self._has_local = True
            dscores = (self.dout @ self.written.mT).view(self.scores.shape)
            dqueries = (self.dout @ self.states.mT).view(self.q.shape)
            dq, self.dk = self.gradients.scores(self.q, self.k, self.scores, dscores)
            self.dq = dq.add_(self.gradients.read(self.q, dqueries)).mul_(self.options.scale)

    def finish(self, target: Gradients) -> None:
        """Write the gradients of the inputs to `target`, which `expanded_gradients` made."""
        self.local()
        found, dk, dv = self.gradients, self.dk, self.dwritten
        dk = dk + found.write(self.k, self.written @ self.dstates.mT)
        found.state((self.states * self.dstates).sum(-1))
        if target.beta is not None:
            dk_erased, dv, dbeta = self._erased()
            dk += dk_erased
            self._join(dbeta, target.beta)
        self.grid.join(self.dq, target.q, self.heads)
        self._join(dk, target.k)
        self._join(dv, target.v)
        dlog_decay = found.log_decay()
        if dlog_decay is not None and target.log_decay is not None:
            wide = dlog_decay if dlog_decay.dim() == 4 else dlog_decay[..., None]
            self._join(wide, target.log_decay)

    def _erased(self) -> tuple[Tensor, Tensor, Tensor]:
        dim, keys = self.k.shape[-1], self.k[:, :, None]
        derases = self.dwritten @ self.states.mT
        dsolved = self.solve(torch.cat([derases.neg_(), self.dwritten], -1), transposed=True)
        dlower = (dsolved @ self.solved.mT).neg_().tril_(-1)
        dbeta = (dsolved * torch.cat([self.readers, self.v], -1)).sum(-1, keepdim=True)
        dbeta += (dlower * self.overlaps[:, :, 0]).sum(-1, keepdim=True)
        dsolved *= self.beta
        doverlaps = dlower.mul_(self.beta)[:, :, None]
        dreaders, dk = self.gradients.scores(keys, self.k, self.overlaps, doverlaps)
        dreaders += self.gradients.read(keys, dsolved[:, :, None, :, :dim])
        return dk + dreaders[:, :, 0], dsolved[..., dim:], dbeta

    def _join(self, chunks: Tensor, target: Tensor) -> None:
        self.grid.join(chunks[:, :, None], target, self.heads)
