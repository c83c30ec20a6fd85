"""The backend "triton" for states: our kernels in `seqpar.kernels.lightning_attention`.

The backend runs on CUDA, for bf16, fp16 and fp32. For tests, it runs on a CPU in Triton's
interpreter (TRITON_INTERPRET=1). Launch arguments that are not tensors are computed once for each
layout, and stored in the `SpanStates` of the layout. Letters of shapes: B is the batch, T the
number of rows, Hq and Hkv the numbers of heads, D the head dim of q and k, and Dv the head dim of
v. States are (n, B, Hkv, D, Dv) in fp32.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from seqpar.attention.backend import triton_refusal
from seqpar.core.device_tables import device_of, is_on_cuda, kept_on, on_stream
from seqpar.core.memo import LOCAL
from seqpar.kernels import lightning_attention as kernels
from seqpar.kernels.gpus import gpu_of
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions

refusal = triton_refusal
_CPU = torch.device("cpu")


class Forward:
    def __init__(self, inputs: Inputs, spans: SpanStates, options: StateOptions) -> None:
        self._operands, self._options = inputs[:3], options
        _, k, v = self._operands
        self._log_decay = _log_decay(options, spans, k)
        (self._walk,) = _walks(("forward",), spans, *self._operands, self._log_decay)
        self._between, self.outgoing = self._walk.states(k, v, self._log_decay, 1.0)
        self._local: Tensor | None = None

    def local(self) -> None:
        if self._options.causal:
            dtype = torch.float32 if self._walk.some_enter else self._operands[0].dtype
            self._local = self._out(None, dtype)

    def finish(self, initial: Tensor | None) -> Tensor:
        q, dtype = self._operands[0], self._operands[0].dtype
        if self._options.causal and self._local is None:
            return self._out(initial, dtype)
        if initial is None:
            # Without causality, a state enters each run. If no states enter, there are no rows.
            return self._empty(dtype) if self._local is None else self._local
        before = self._local
        out = before if before is not None and before.dtype == dtype else self._empty(dtype)
        initial, scale = initial.contiguous(), self._options.scale
        self._walk.carry("out", q, before, out, initial, self._log_decay, scale)
        return out

    def _out(self, initial: Tensor | None, dtype: torch.dtype) -> Tensor:
        out, scale = self._empty(dtype), self._options.scale
        initial = None if initial is None else initial.contiguous()
        self._walk.recurrence(
            "out", self._operands, out, self._between, initial, self._log_decay, scale
        )
        return out

    def _empty(self, dtype: torch.dtype) -> Tensor:
        q, _, v = self._operands
        return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


class Backward:
    def __init__(
        self,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: StateOptions,
        initial: Tensor | None,
    ) -> None:
        self._operands, self._options = (*inputs[:3], dout), options
        self._initial = None if initial is None else initial.contiguous()
        self._log_decay = _log_decay(options, spans, inputs.k)
        operands = *self._operands, self._log_decay
        # dk and dv are computed from the end of a span to its start, and dq from the start to the
        # end.
        self._walk, self._along = _walks(("backward", "queries"), spans, *operands)
        common = self._log_decay, options.scale
        self._between, self.outgoing = self._walk.states(inputs.q, dout, *common)
        self._local: tuple[Tensor, Tensor, Tensor] | None = None

    def local(self) -> None:
        if self._options.causal:
            self._local = self._dq(), *self._dk_dv(None)

    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dfinal = None if dfinal is None else dfinal.contiguous()
        if self._options.causal and self._local is None:
            return self._dq(), *self._dk_dv(dfinal)
        q, k, v, dout = self._operands
        dq, dk, dv = self._local or map(_gradient, (q, k, v))
        if self._local is None and self._initial is not None:
            common = self._initial.mT, self._log_decay, self._options.scale
            self._along.carry("dq", dout, None, dq, *common)
        if dfinal is not None:
            for name, x, gradient, after in (("dk", v, dk, dfinal.mT), ("dv", k, dv, dfinal)):
                before = None if self._local is None else gradient
                self._walk.carry(name, x, before, gradient, after, self._log_decay, 1.0)
        return dq, dk, dv

    def _dq(self) -> Tensor:
        (q, k, v, dout), log_decay = self._operands, self._log_decay
        between, _ = self._along.states(k, v, log_decay, 1.0)
        initial = None if self._initial is None else self._initial.mT
        dq, common = _gradient(q), (log_decay, self._options.scale)
        self._along.recurrence("dq", (dout, v, k), dq, between.mT, initial, *common)
        return dq

    def _dk_dv(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, dout = self._operands
        dk, dv = _gradient(k), _gradient(v)
        transposed = self._between.mT, None if dfinal is None else dfinal.mT
        common = self._log_decay, self._options.scale
        self._walk.recurrence("dk", (v, dout, q), dk, *transposed, *common)
        self._walk.recurrence("dv", (k, q, dout), dv, self._between, dfinal, *common)
        return dk, dv


def _gradient(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def _log_decay(options: StateOptions, spans: SpanStates, k: Tensor) -> Tensor:
    """Return log λ, (Hkv,) in fp64. Without decay, return zeros."""
    if options.log_decay is None or not options.causal:
        heads, device = k.shape[2], k.device
        make = lambda: torch.zeros(heads, dtype=torch.float64, device=device)  # noqa: E731
        return on_stream(device, spans.derived, (LOCAL, "no decay", heads, device), make)
    return options.log_decay


class _Walk:
    """The kernel launches that process all spans in one direction, for fixed shapes and dtypes.

    A *span* is a range of a document's tokens on one rank, and a *segment* is a range of rows of a
    span. The object contains the tables of the segments. It stores the arguments of each kernel
    launch under the name of the result that the kernel computes.
    """

    def __init__(self, tables: kernels.SegmentTables, reverse: bool, k: Tensor, v: Tensor) -> None:
        self._tables, self._reverse = tables, reverse
        self._configs = [
            kernels.choose(kind, k, v.shape[-1]) for kind in ("states", "recurrence", "carry")
        ]
        # The key of the cache. The walk itself cannot be the key, because this would be a cycle.
        self._known_by = object()
        self.some_enter = tables.carried.numel() > 0

    def states(
        self, x: Tensor, y: Tensor, log_decay: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the states before segments, and the states that leave spans. A segment is a range
        of rows of a span.
        """
        return kernels.states(
            x, y, self._tables, self._configs[0], log_decay=log_decay, scale=scale,
            reverse=self._reverse, known_by=self._known_by,
        )  # fmt: skip

    def recurrence(
        self,
        name: str,
        operands: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        between: Tensor,
        initial: Tensor | None,
        log_decay: Tensor,
        scale: float,
    ) -> None:
        """Compute the result `name`, and write it to `out`. `between` has the states before
        segments, from the method `states`.
        """
        kernels.recurrence(
            *operands, self._tables, self._configs[1], out=out, between=between, initial=initial,
            log_decay=log_decay, scale=scale, reverse=self._reverse,
            known_by=(self._known_by, name, initial is None, out.dtype),
        )  # fmt: skip

    def carry(
        self,
        name: str,
        x: Tensor,
        before: Tensor | None,
        out: Tensor,
        initial: Tensor,
        log_decay: Tensor,
        scale: float,
    ) -> None:
        """Write to `out` the sum of `before` and of the contribution of the states `initial` that
        enter spans.
        """
        kernels.carry(
            x, self._tables, self._configs[2], before=before, out=out, initial=initial,
            log_decay=log_decay, scale=scale, reverse=self._reverse,
            known_by=(self._known_by, name, before is None, out.dtype),
        )  # fmt: skip


def _walks(kinds: tuple[str, ...], spans: SpanStates, *operands: Tensor) -> list[_Walk]:
    """Return the kernel launches for each name in `kinds`. `operands[1]` is k, and `operands[2]` is
    v.

    The kind "forward" computes out, "queries" computes dq, and "backward" computes dk and dv. A
    span is a range of a document's tokens on one rank. "forward" and "queries" process the rows of
    a span from the start to the end. "queries" returns no states that leave spans. "backward"
    processes the rows of a span from the end to the start.
    """

    def build() -> list[_Walk]:
        _, k, v, *_ = operands
        return [_Walk(_tables(spans, kind, k, v), kind == "backward", k, v) for kind in kinds]

    key = LOCAL, "walks", kinds, kernels.signature(*operands)
    return spans.derived(key, build)


def request_tables(inputs: Inputs, spans: SpanStates, backward: bool) -> None:
    _, k, v, *_ = inputs
    for kind in ("backward", "queries") if backward else ("forward",):
        _tables(spans, kind, k, v)


def _tables(spans: SpanStates, kind: str, k: Tensor, v: Tensor) -> kernels.SegmentTables:
    rows = _segment_rows(k, v)

    def build() -> kernels.SegmentTables:
        incoming, outgoing = spans.state_in, spans.state_out
        if kind == "queries":
            outgoing = np.full_like(outgoing, -1)
        if kind == "backward":
            incoming, outgoing = outgoing, incoming
        reverse = kind == "backward"
        return kernels.segment_tables(spans.edges, incoming, outgoing, rows, _CPU, reverse)

    return kept_on(k.device, spans.derived, ("segment tables", kind, rows), build)


def _segment_rows(k: Tensor, v: Tensor) -> int:
    """Return the number of rows in a segment, chosen so that the device runs two programs per
    multiprocessor.
    """
    if not is_on_cuda(k):
        return kernels.segment_length(k.shape[1], 1)
    config = kernels.choose("recurrence", k, v.shape[-1], device_of(k))
    programs = k.shape[0] * k.shape[2] * triton.cdiv(v.shape[-1], config.block(v.shape[-1]))
    processors = gpu_of(device_of(k)).processors
    return kernels.segment_length(k.shape[1], -(-2 * processors // max(1, programs)))
