"""Attention over slices with varlen kernels: one call for all documents, if they share a window.

Legend: B batch, T query rows, n query rows and m key rows of a call in all batch entries, H heads
(Hq of queries, Hkv of keys and values), D head dim (Dv of values).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_tables import rehearsing
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import reference
from seqpar.softmax.backends.kernel_operands import (
    aligned_heads,
    joint_head_dim,
    positive_scale,
    with_column,
)
from seqpar.softmax.backends.varlen_calls import (
    SegmentTables,
    VarlenCall,
    VarlenWork,
    varlen_work,
)
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from seqpar.softmax.wire.row_messages import Rows

_HALF = (torch.bfloat16, torch.float16)


class BackwardRows(NamedTuple):
    """Rows of a call that a backward kernel reads.

    dout, q and out are (n, Hq, D), k and v (m, Hkv, D). out and lse (Hq, n) are the final ones,
    over all keys on all ranks. dlse (Hq, n) is None if lse has no gradient, or if it is in dout.
    """

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    k: Tensor
    v: Tensor


class VarlenKernel(NamedTuple):
    """A kernel that computes the segments of a call, in bf16 or fp16.

    All operands have one head dim, a multiple of 8. Results are new tensors: callers may keep and
    change them.
    """

    # Gets q (n, Hq, D), k and v (m, Hkv, D), and returns out (n, Hq, D) and the natural lse (Hq, n)
    # in fp32
    forward: Callable[[Tensor, Tensor, Tensor, SegmentTables, CallOptions], tuple[Tensor, Tensor]]
    # Returns dq, dk and dv of its rows, which may have more columns, of zeros
    backward: Callable[[BackwardRows, SegmentTables, CallOptions], tuple[Tensor, Tensor, Tensor]]
    max_head_dim: int  # the largest D
    softcap: bool = False  # whether it computes scores with a softcap
    # Whether backward takes dlse. Otherwise the gradient of lse is added to dout·v: v gets a column
    # of ones, dout a column of dlse, and out a column of zeros.
    lse_gradient: bool = False
    # Whether backward gives the same bits each time when the options ask for it. Otherwise our
    # Triton kernels compute such a backward.
    deterministic: bool = False
    only_dense: bool = False  # whether it computes only dense calls; see `VarlenCall.is_dense`

    def takes(self, q: Tensor, v: Tensor, options: CallOptions, has_dlse: bool) -> bool:
        """Return whether the kernel computes scores with these options, of these operands."""
        value_dim = v.shape[-1] + (has_dlse and not self.lse_gradient)
        fits = q.dtype in _HALF and max(q.shape[-1], value_dim) <= self.max_head_dim
        return fits and options.slopes is None and (self.softcap or not options.softcap)

    def computes_all(self, q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> bool:
        """Return whether the kernel computes all slices, also with a gradient of lse."""
        if not self.takes(q, v, options, True):
            return False
        calls, remaining = varlen_work(slices)
        is_dense = not self.only_dense or all(call.is_dense for call in calls)
        return remaining is None and is_dense

    def _work(
        self, q: Tensor, v: Tensor, slices: Slices, options: CallOptions, has_dlse: bool
    ) -> VarlenWork:
        if not self.takes(q, v, options, has_dlse):
            return VarlenWork([], slices)
        return varlen_work(slices)

    def merge_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        partial: Partial,
        options: CallOptions,
    ) -> None:
        value_dim, batch = v.shape[-1], q.shape[0]
        calls, remaining = self._work(q, v, slices, options, has_dlse=False)
        if remaining is not None:
            reference.forward(q, k, v, remaining, partial, options)
        if not calls:
            return
        width = joint_head_dim(q, v)
        q, options, _ = positive_scale(q, options)
        q, k, v = (aligned_heads(x, width) for x in (q, k, v))
        for call in calls:
            if rehearsing():
                call.request_tables(batch, q.device)
                continue
            partial.sums.release()
            packed = _flat(q, call.queries), _flat(k, call.keys), _flat(v, call.keys)
            flat_out, flat_lse = self.forward(*packed, call.tables(batch, q.device), options)
            out = flat_out[..., :value_dim].unflatten(0, (batch, -1))
            lse = flat_lse.unflatten(1, (batch, -1)).permute(1, 2, 0)
            is_result = call.queries.are_all(q.shape[1]) and out.is_contiguous()
            if not (is_result and partial.sums.keep(out, lse)):
                partial.merge(call.queries.local(q.device), out, lse)

    def add_gradients(
        self,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        gradients: PartialGradients,
        options: CallOptions,
    ) -> None:
        has_dlse = output.dlse is not None
        untrusted = options.deterministic and not self.deterministic
        if untrusted and self.takes(q, v, options, has_dlse):
            from seqpar.softmax.backends import triton

            triton.backward(output, q, k, v, slices, gradients, options)
            return
        has_column = has_dlse and not self.lse_gradient
        value_dim, batch = v.shape[-1], q.shape[0]
        calls, remaining = self._work(q, v, slices, options, has_dlse)
        if remaining is not None:
            reference.backward(output, q, k, v, remaining, gradients, options)
        if not calls:
            return
        if has_column:
            v = with_column(v, torch.ones_like(v[..., 0]))
        width = joint_head_dim(q, v)
        k, v = (aligned_heads(x, width) for x in (k, v))
        for call in calls:
            if rehearsing():
                call.request_tables(batch, q.device)
                continue
            gradients.release()
            queries = _Queries.of(output, q, call, width, has_column, options)
            rows = BackwardRows(*queries.tensors, _flat(k, call.keys), _flat(v, call.keys))
            results = self.backward(rows, call.tables(batch, q.device), queries.options)
            dq, dk, dv = (x.unflatten(0, (batch, -1)) for x in results)
            dq, dk, dv = dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., :value_dim]
            all_queries = call.queries.are_all(q.shape[1]) and queries.sign == 1
            if not (all_queries and gradients.queries.keep(dq)):
                _add(dq, call.queries, gradients.dq, queries.sign)
            if not (call.keys.are_all(k.shape[1]) and gradients.keys.keep(dk, dv)):
                _add(dk, call.keys, gradients.dk)
                _add(dv, call.keys, gradients.dv)


class _Queries(NamedTuple):
    """The query rows of a call in backward, kept for the next call with the same rows."""

    # q, key: the sources of the tensors
    q: Tensor
    key: tuple[bytes, int, bool]
    # dout, q, out, lse and dlse of `BackwardRows`
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    # options, sign: see `positive_scale`
    options: CallOptions
    sign: int

    @classmethod
    def of(
        cls,
        output: OutputGradient,
        q: Tensor,
        call: VarlenCall,
        width: int,
        has_column: bool,
        options: CallOptions,
    ) -> _Queries:
        kept, key = output.prepared, (call.query_key, width, has_column)
        if isinstance(kept, cls) and kept.q is q and kept.key == key:
            return kept
        output.prepared = kept = None  # frees the rows of another call
        dout, out = _flat(output.dout, call.queries), _flat(output.ensure_out(), call.queries)
        lse = _flat(output.lse, call.queries).t().contiguous()
        dlse = None if output.dlse is None else _flat(output.dlse, call.queries)
        if has_column:
            assert dlse is not None
            dout, dlse = with_column(dout, dlse), None
        scaled, options, sign = positive_scale(_flat(q, call.queries), options)
        dout, rows, out = (aligned_heads(x, width) for x in (dout, scaled, out))
        tensors = dout, rows, out, lse, None if dlse is None else dlse.t().contiguous()
        output.prepared = queries = cls(q, key, tensors, options, sign)
        return queries


def _flat(x: Tensor, rows: Rows) -> Tensor:
    """Return rows of x (B, T, …), of all batch entries one after another: (n, …)."""
    local = rows.local(x.device)
    part = x[:, local] if isinstance(local, slice) else x.index_select(1, local)
    return part.flatten(0, 1)


def _add(part: Tensor, rows: Rows, total: Tensor, sign: int = 1) -> None:
    """Add a part (B, n, H, D), times a sign, to rows of the total (B, T, H, D)."""
    local = rows.local(total.device)
    if isinstance(local, slice):
        total[:, local].add_(part, alpha=sign)
    elif total.is_cuda:  # without a copy in fp32
        from seqpar.kernels.flash_attention import add_to_rows  # imports Triton

        add_to_rows(part, total, local, sign)
    else:
        total.index_add_(1, local, part.to(total.dtype), alpha=sign)
