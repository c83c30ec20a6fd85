"""The gradients of chunks, while the gradients of states pass through them in reverse; see `aten`.

They are written out because an operator's implementation runs below autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.linear.inputs import Gradients, Inputs
from seqpar.linear.maps.backends.chunks import Chunks
from seqpar.linear.maps.backends.grid import Grid
from seqpar.linear.maps.backends.per_head import PerHead, PerHeadGradients
from seqpar.linear.maps.backends.per_key import PerKeyGradients
from seqpar.linear.maps.backends.sweep import Step, sweep
from seqpar.linear.maps.options import MapOptions


class ChunkGradients(Chunks):
    """Chunks through which states have passed, with the gradient of out."""

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

    def step_back(self) -> Step:
        """Return each chunk's step on the gradient of a state."""
        if self.kind.uses_beta:
            return Step(self.powers.total, self.added, self.drows, self.writers, self.erases.mT)
        return Step(self.powers.total, self.added)

    def backward(self, dstates: Tensor | None) -> None:
        """Pass gradients of states through, given those of the states that leave spans.

        It sets `dstates` and `dwritten` of each chunk, and `dlast`, of the states that enter.
        """
        starts = self.starts(dstates, self.grid.leaving)
        swept = sweep(self.grid, self.step_back(), starts, reverse=True)
        self.dstates, self.dlast = swept.states, swept.last
        dwritten = swept.rows
        if dwritten is None:
            dwritten = self.drows + self.writers @ self.dstates
        self.dwritten = dwritten

    def local(self) -> None:
        """Compute once the gradients of q, and the part of dk from the rows that read k."""
        if not self._has_local:
            self._has_local = True
            dscores = (self.dout @ self.written.mT).view(self.scores.shape)
            dqueries = (self.dout @ self.states.mT).view(self.q.shape)
            dq, self.dk = self.gradients.scores(self.q, self.k, self.scores, dscores)
            self.dq = dq.add_(self.gradients.read(self.q, dqueries)).mul_(self.options.scale)

    def finish(self, target: Gradients) -> None:
        """Set the rows of the gradients `target`, shaped as for `inputs.fold`."""
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
        """Return the gradients of k, v and β through W and U."""
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
