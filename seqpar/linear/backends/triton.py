"""Linear attention over spans with our Triton kernels, `seqpar.kernels.lightning_attention`.

On CUDA, for bf16, fp16 and fp32; on a CPU only under Triton's interpreter (TRITON_INTERPRET=1),
which is for tests. Tables are built once for each layout and kept with the spans. B batch, T rows,
Hq and Hkv heads, D and Dv their dims; states are (n, B, Hkv, D, Dv) fp32.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
from torch import Tensor

from seqpar.backend import triton_refusal
from seqpar.kernels import lightning_attention as kernels
from seqpar.linear.spans import LinearOptions, SpanStates

refusal = triton_refusal


class Forward:
    """The forward in steps; see `ForwardSteps` in `seqpar.linear.attend`."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spans: SpanStates, options: LinearOptions
    ) -> None:
        self._operands, self._options = (q, k, v), options
        self._log_decay = _log_decay(options, spans, k)
        self._tables = _tables(spans, "forward", k, v)
        config = kernels.choose("states", k, v.shape[-1])
        self._between, self.states = kernels.states(
            k, v, self._tables, config, log_decay=self._log_decay, scale=1.0, reverse=False
        )
        self._local: Tensor | None = None

    def local(self) -> None:
        """Compute all that needs no state which enters."""
        if self._options.causal:
            some_enter = self._tables.carried.numel() > 0
            dtype = torch.float32 if some_enter else self._operands[0].dtype
            self._local = self._walk(None, dtype)

    def finish(self, initial: Tensor | None) -> Tensor:
        """Return out (B, T, Hq, Dv) in q's dtype, given the states that enter spans.

        Without causality they are the sums of all states of documents, which enter runs.
        """
        q, dtype = self._operands[0], self._operands[0].dtype
        if self._options.causal and self._local is None:
            return self._walk(initial, dtype)
        if initial is None:
            # Without causality a state enters each run, so there are no rows.
            return self._empty(dtype) if self._local is None else self._local
        before = self._local
        out = before if before is not None and before.dtype == dtype else self._empty(dtype)
        _carry(
            q,
            self._tables,
            before,
            out,
            initial.contiguous(),
            self._log_decay,
            self._options.scale,
            reverse=False,
        )
        return out

    def _walk(self, initial: Tensor | None, dtype: torch.dtype) -> Tensor:
        q, k, v = self._operands
        out = self._empty(dtype)
        kernels.recurrence(
            q, k, v, self._tables, kernels.choose("recurrence", q, v.shape[-1]), out=out,
            between=self._between, initial=None if initial is None else initial.contiguous(),
            log_decay=self._log_decay, scale=self._options.scale, reverse=False,
        )  # fmt: skip
        return out

    def _empty(self, dtype: torch.dtype) -> Tensor:
        q, _, v = self._operands
        return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


class Backward:
    """The backward in steps; see `BackwardSteps` in `seqpar.linear.attend`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        spans: SpanStates,
        options: LinearOptions,
        initial: Tensor | None,
    ) -> None:
        self._operands, self._options = (q, k, v, dout), options
        self._spans, self._initial = spans, None if initial is None else initial.contiguous()
        self._log_decay = _log_decay(options, spans, k)
        self._tables = _tables(spans, "backward", k, v)
        config = kernels.choose("states", q, v.shape[-1])
        self._between, self.states = kernels.states(
            q,
            dout,
            self._tables,
            config,
            log_decay=self._log_decay,
            scale=options.scale,
            reverse=True,
        )
        self._local: tuple[Tensor, Tensor, Tensor] | None = None

    def local(self) -> None:
        """Compute all that needs no gradient of states which leave."""
        if self._options.causal:
            self._local = self._dq(), *self._dk_dv(None)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv in fp32, given the gradients of the states that leave spans.

        Without causality they are the sums over documents, which leave runs.
        """
        dfinal = None if dfinal is None else dfinal.contiguous()
        if self._options.causal and self._local is None:
            return self._dq(), *self._dk_dv(dfinal)
        q, k, v, dout = self._operands
        dq, dk, dv = self._local or map(_gradient, (q, k, v))
        if self._local is None and self._initial is not None:
            scale = self._options.scale
            _carry(
                dout,
                self._tables,
                None,
                dq,
                self._initial.mT,
                self._log_decay,
                scale,
                reverse=False,
            )
        if dfinal is not None:
            for x, gradient, state in ((v, dk, dfinal.mT), (k, dv, dfinal)):
                before = None if self._local is None else gradient
                _carry(x, self._tables, before, gradient, state, self._log_decay, 1.0, reverse=True)
        return dq, dk, dv

    def _dq(self) -> Tensor:
        q, k, v, dout = self._operands
        tables, config = (
            _tables(self._spans, "queries", k, v),
            kernels.choose("states", k, v.shape[-1]),
        )
        between, _ = kernels.states(
            k, v, tables, config, log_decay=self._log_decay, scale=1.0, reverse=False
        )
        dq = _gradient(q)
        kernels.recurrence(
            dout, v, k, tables, kernels.choose("recurrence", dout, q.shape[-1]), out=dq,
            between=between.mT, initial=None if self._initial is None else self._initial.mT,
            log_decay=self._log_decay, scale=self._options.scale, reverse=False,
        )  # fmt: skip
        return dq

    def _dk_dv(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, dout = self._operands
        dk, dv = _gradient(k), _gradient(v)
        transposed = self._between.mT, None if dfinal is None else dfinal.mT
        walks = (v, dout, q, dk, *transposed), (k, q, dout, dv, self._between, dfinal)
        for x, y, z, gradient, between, after in walks:
            kernels.recurrence(
                x, y, z, self._tables, kernels.choose("recurrence", x, z.shape[-1]), out=gradient,
                between=between, initial=after, log_decay=self._log_decay,
                scale=self._options.scale, reverse=True,
            )  # fmt: skip
        return dk, dv


def _gradient(x: Tensor) -> Tensor:
    """Return an empty tensor for the gradient of x, in fp32."""
    return x.new_empty(x.shape, dtype=torch.float32)


def _log_decay(options: LinearOptions, spans: SpanStates, k: Tensor) -> Tensor:
    """Return log λ, (Hkv,) fp64; zeros, kept with the spans, where nothing decays."""
    if options.log_decay is None or not options.causal:
        heads, device = k.shape[2], k.device
        return spans.derived(
            ("no decay", heads, device),
            lambda: torch.zeros(heads, dtype=torch.float64, device=device),
        )
    return options.log_decay.to(torch.float64)


def _carry(
    x: Tensor,
    tables: kernels.SegmentTables,
    before: Tensor | None,
    out: Tensor,
    initial: Tensor,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
) -> None:
    config = kernels.choose("carry", x, out.shape[-1])
    kernels.carry(
        x,
        tables,
        config,
        before=before,
        out=out,
        initial=initial,
        log_decay=log_decay,
        scale=scale,
        reverse=reverse,
    )


def _tables(spans: SpanStates, kind: str, k: Tensor, v: Tensor) -> kernels.SegmentTables:
    """Return the tables of a walk over the spans, which are kept with the spans.

    `kind` is "forward", for out; "queries", for dq, a forward walk that no state leaves; or
    "backward", for dk and dv, a walk from the end.
    """
    rows = _segment_rows(k, v)

    def build() -> kernels.SegmentTables:
        incoming, outgoing = spans.state_in, spans.state_out
        if kind == "queries":
            outgoing = np.full_like(outgoing, -1)
        if kind == "backward":
            incoming, outgoing = outgoing, incoming
        reverse = kind == "backward"
        return kernels.segment_tables(spans.edges, incoming, outgoing, rows, k.device, reverse)

    return spans.derived(("segment tables", kind, rows, k.device), build)


def _segment_rows(k: Tensor, v: Tensor) -> int:
    """Return how many rows a segment has: two programs for each multiprocessor fill a device."""
    if not k.is_cuda:
        return kernels.segment_length(k.shape[1], 1)
    config = kernels.choose("recurrence", k, v.shape[-1])
    programs = k.shape[0] * k.shape[2] * triton.cdiv(v.shape[-1], config.block(v.shape[-1]))
    return kernels.segment_length(
        k.shape[1], -(-2 * _multiprocessors(k.device) // max(1, programs))
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
