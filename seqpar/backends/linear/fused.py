"""Linear attention over spans with our Triton kernels (`seqpar.kernels.lightning_attention`), the backend named "triton".

On CUDA, for bf16, fp16 and fp32; on a CPU only under Triton's interpreter (TRITON_INTERPRET=1), which is for tests. Tables
are built once for each layout and kept with the spans. B batch, T rows, Hq and Hkv heads, D and Dv their dims; states are
(n, B, Hkv, D, Dv) fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from torch import Tensor

from seqpar.backends import fused
from seqpar.kernels import lightning_attention as kernels

if TYPE_CHECKING:
    from seqpar.linear import Recurrence, Spans


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these operands cannot be computed, naming the argument, or None."""
    return fused.refusal(q, v)


class Forward:
    """out, in two steps with the exchange of states between them; `states` are those that leave spans, from zero."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> None:
        self._operands, self._recurrence = (q, k, v), recurrence
        self._log_decay = _log_decay(recurrence, k)
        self._plan = _plan(spans, "forward", k, v)
        config = kernels.choose("states", k, v.shape[-1])
        self._between, self.states = kernels.states(
            k, v, self._plan, config, log_decay=self._log_decay, scale=1.0, reverse=False
        )
        self._local: Tensor | None = None

    def local(self) -> None:
        """Compute all that needs no state which enters."""
        if self._recurrence.causal:
            entered = self._plan.carried.numel() > 0
            self._local = self._walk(None, torch.float32 if entered else self._operands[0].dtype)

    def finish(self, initial: Tensor | None) -> Tensor:
        """out (B, T, Hq, Dv) in q's dtype, given the states that enter, of all spans that one enters; those of complete
        runs if it is not causal."""
        q, dtype = self._operands[0], self._operands[0].dtype
        if self._recurrence.causal and self._local is None:
            return self._walk(initial, dtype)
        if initial is None:
            assert self._local is not None
            return self._local
        before = self._local
        out = before if before is not None and before.dtype == dtype else self._empty(dtype)
        _carry(q, self._plan, before, out, initial.contiguous(), self._log_decay, self._recurrence.scale, reverse=False)
        return out

    def _walk(self, initial: Tensor | None, dtype: torch.dtype) -> Tensor:
        q, k, v = self._operands
        out = self._empty(dtype)
        kernels.recurrence(
            q, k, v, self._plan, kernels.choose("recurrence", q, v.shape[-1]), out=out, between=self._between,
            initial=None if initial is None else initial.contiguous(), log_decay=self._log_decay,
            scale=self._recurrence.scale, reverse=False,
        )  # fmt: skip
        return out

    def _empty(self, dtype: torch.dtype) -> Tensor:
        q, _, v = self._operands
        return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


class Backward:
    """dq, dk and dv in two steps; `states` are the gradients of the states that enter, from their spans' own rows."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spans: Spans, recurrence: Recurrence, initial: Tensor | None
    ) -> None:
        self._operands, self._recurrence = (q, k, v, dout), recurrence
        self._spans, self._initial = spans, None if initial is None else initial.contiguous()
        self._log_decay = _log_decay(recurrence, k)
        self._plan = _plan(spans, "backward", k, v)
        config = kernels.choose("states", q, v.shape[-1])
        self._between, self.states = kernels.states(
            q, dout, self._plan, config, log_decay=self._log_decay, scale=recurrence.scale, reverse=True
        )
        self._local: tuple[Tensor, Tensor, Tensor] | None = None

    def local(self) -> None:
        """Compute all that needs no gradient of states which leave."""
        if self._recurrence.causal:
            self._local = self._dq(), *self._dk_dv(None)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv fp32, given the gradients of the states that leave; those of complete runs if it is not causal."""
        dfinal = None if dfinal is None else dfinal.contiguous()
        if self._recurrence.causal and self._local is None:
            return self._dq(), *self._dk_dv(dfinal)
        q, k, v, dout = self._operands
        dq, dk, dv = self._local or map(_gradient, (q, k, v))
        if self._local is None:
            assert self._initial is not None
            scale = self._recurrence.scale
            _carry(dout, self._plan, None, dq, self._initial.mT, self._log_decay, scale, reverse=False)
        if dfinal is not None:
            for x, gradient, state in ((v, dk, dfinal.mT), (k, dv, dfinal)):
                before = None if self._local is None else gradient
                _carry(x, self._plan, before, gradient, state, self._log_decay, 1.0, reverse=True)
        return dq, dk, dv

    def _dq(self) -> Tensor:
        q, k, v, dout = self._operands
        plan, config = _plan(self._spans, "queries", k, v), kernels.choose("states", k, v.shape[-1])
        between, _ = kernels.states(k, v, plan, config, log_decay=self._log_decay, scale=1.0, reverse=False)
        dq = _gradient(q)
        kernels.recurrence(
            dout, v, k, plan, kernels.choose("recurrence", dout, q.shape[-1]), out=dq, between=between.mT,
            initial=None if self._initial is None else self._initial.mT, log_decay=self._log_decay,
            scale=self._recurrence.scale, reverse=False,
        )  # fmt: skip
        return dq

    def _dk_dv(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, dout = self._operands
        dk, dv = _gradient(k), _gradient(v)
        transposed = self._between.mT, None if dfinal is None else dfinal.mT
        walks = (v, dout, q, dk, *transposed), (k, q, dout, dv, self._between, dfinal)
        for x, y, z, gradient, between, after in walks:
            kernels.recurrence(
                x, y, z, self._plan, kernels.choose("recurrence", x, z.shape[-1]), out=gradient, between=between,
                initial=after, log_decay=self._log_decay, scale=self._recurrence.scale, reverse=True,
            )  # fmt: skip
        return dk, dv


def _gradient(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _log_decay(recurrence: Recurrence, k: Tensor) -> Tensor:
    """(Hkv,) fp64; zeros where nothing decays."""
    if recurrence.log_decay is None or not recurrence.causal:
        return k.new_zeros(k.shape[2], dtype=torch.float64)
    return recurrence.log_decay.to(torch.float64)


def _carry(
    x: Tensor,
    plan: kernels.Plan,
    before: Tensor | None,
    out: Tensor,
    initial: Tensor,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
) -> None:
    config = kernels.choose("carry", x, out.shape[-1])
    kernels.carry(x, plan, config, before=before, out=out, initial=initial, log_decay=log_decay, scale=scale, reverse=reverse)


def _plan(spans: Spans, kind: str, k: Tensor, v: Tensor) -> kernels.Plan:
    """Tables of the walk for out ("forward"), for dq, where no state leaves ("queries"), or from the end ("backward")."""
    rows = _segment_rows(k, v)
    key = "lightning", kind, rows, k.device
    if key not in spans.lowered:
        incoming, outgoing = spans.enter, spans.leave
        if kind == "queries":
            outgoing = np.full_like(outgoing, -1)
        if kind == "backward":
            incoming, outgoing = outgoing, incoming
        spans.lowered[key] = kernels.cut(spans.edges, incoming, outgoing, rows, k.device, kind == "backward")
    plan: kernels.Plan = spans.lowered[key]
    return plan


def _segment_rows(k: Tensor, v: Tensor) -> int:
    """How long segments are: two programs for each multiprocessor fill a device."""
    if not k.is_cuda:
        return kernels.segment_rows(k.shape[1], 1)
    config = kernels.choose("recurrence", k, v.shape[-1])
    programs = k.shape[0] * k.shape[2] * triton.cdiv(v.shape[-1], config.tile(v.shape[-1]))
    multiprocessors = torch.cuda.get_device_properties(k.device).multi_processor_count
    return kernels.segment_rows(k.shape[1], -(-2 * multiprocessors // max(1, programs)))
