"""The chunks of spans, as states pass through them, in the notation of `aten`."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Inputs
from seqpar.linear.maps.backends.grid import Grid
from seqpar.linear.maps.backends.per_head import PerHead
from seqpar.linear.maps.backends.per_key import PerKey
from seqpar.linear.maps.backends.places import Places
from seqpar.linear.maps.backends.sweep import Step, last_states, sweep
from seqpar.linear.maps.options import MapOptions


class Chunks:
    """The chunks of a grid's spans, and the rows that they write to states.

    Attributes:
        k: (M, N, C, K).
        v: (M, N, C, V).
        powers: the decays.
        writers: K̃ (M, N, C, K).
        rows: U (M, N, C, V), which is v without the delta rule.

    And, by the delta rule:
        beta: (M, N, C, 1).
        overlaps: K Kᵀ ⊙ Λ (M, N, 1, C, C).
        readers: K̂ (M, N, C, K).
        solved: W and U, side by side.
        erases: −W (M, N, C, K).
    """

    beta: Tensor
    overlaps: Tensor
    readers: Tensor
    solved: Tensor
    erases: Tensor
    _added: Tensor | None  # to states, between the sweep for maps and that of `forward`

    def __init__(self, inputs: Inputs, grid: Grid, options: MapOptions) -> None:
        self.kind, self.inputs, self.grid, self.options = options.kind, inputs, grid, options
        self.dtype, self.heads = accumulator_dtype(inputs.q.dtype), inputs.heads
        self.shape = inputs.state_shape[0] * self.heads, *inputs.state_shape[2:]  # (N, K, V)
        self.k, self.v = (self.cut(x)[:, :, 0] for x in (inputs.k, inputs.v))
        self.powers = self._powers()
        self.writers, self.rows = self.powers.write(self.k), self.v
        if inputs.beta is not None:
            self._erase(inputs.beta)
        self._has_read, self._added = False, None

    def cut(self, x: Tensor) -> Tensor:
        """Return the chunks of x (B, T, h, D): (M, N, G, C, D)."""
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
        """Return (I + L)⁻¹ x, or with the transpose."""
        lower = self.overlaps[:, :, 0] * self.beta  # its diagonal is not read
        lower = lower.mT if transposed else lower
        return torch.linalg.solve_triangular(lower, x, upper=transposed, unitriangular=True)

    def read(self) -> None:
        """Compute once the scores of rows with each other, and the rows that read states.

        q is (M, N, G, C, K), already with the scale, scores (M, N, G, C, C), and queries, Q̂, (M, N,
        G · C, K).
        """
        if not self._has_read:
            self._has_read = True
            self.q = self.cut(self.inputs.q).mul_(self.options.scale)
            self.scores = self.powers.scores(self.q, self.k)
            self.queries = self.powers.read(self.q).flatten(2, 3)

    def starts(self, states: Tensor | None, places: Places) -> Tensor:
        """Return `states` (n, B, H, K, V) at the grid's spans, and otherwise 0."""
        return places.fill(self.k.new_zeros((self.grid.spans, *self.shape)), states)

    def step(self) -> Step:
        """Return each chunk's step on a state."""
        if self.kind.uses_beta:
            return Step(self.powers.total, None, self.rows, self.erases, self.writers.mT)
        if self._added is None:
            self._added = self.writers.mT @ self.rows
        return Step(self.powers.total, self._added)

    def forward(self, states: Tensor | None) -> None:
        """Pass states through, given those that enter spans: `states` and `written` (Y) result.

        These are of each chunk, and `last` is what leaves the spans.
        """
        swept = sweep(self.grid, self.step(), self.starts(states, self.grid.entering))
        self._added = None
        self.states, self.last = swept.states, swept.last
        self.written = self.rows if swept.rows is None else swept.rows

    def out(self) -> Tensor:
        """Return out (M, N, G, C, V)."""
        out = self.scores.flatten(2, 3) @ self.written
        out += self.queries @ self.states
        return out.unflatten(2, self.scores.shape[2:4])

    def transition(self, reverse: bool) -> Tensor:
        """Return the transitions of spans, with `reverse` transposed: (spans, N[, K[, K]])."""
        if not self.kind.uses_beta:
            return self._product_of_decays()
        count, dim = self.shape[:2]
        eye = torch.eye(dim, dtype=self.dtype, device=self.k.device)
        states = eye.expand(self.grid.spans, count, dim, dim)
        maps = (self.writers, self.erases.mT) if reverse else (self.erases, self.writers.mT)
        step = Step(self.powers.total, None, None, *maps)
        # Decays soon make numbers or their products subnormal, and cores are slow with those.
        least = torch.finfo(self.dtype).tiny / torch.finfo(self.dtype).eps
        return last_states(self.grid, step, states, reverse, least)

    def _product_of_decays(self) -> Tensor:
        per_key = self.kind.transition == "key"
        shape = self.grid.spans, self.shape[0], self.shape[1] if per_key else 1
        logs = self.k.new_zeros(shape, dtype=torch.float64)
        if self.powers.total is not None:
            for chunks in self.grid.steps:
                logs[: chunks.stop - chunks.start] += self.powers.total[chunks]
        return logs.exp().to(self.dtype).view(shape if per_key else shape[:2])
