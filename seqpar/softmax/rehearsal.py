"""Find the tables of a call before it begins, and send them to the device in one copy.

A rehearsal runs the strategy's forward and backward on meta tensors. Nothing is computed or sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from seqpar.attention.rehearsal import Preparation, RehearsableCall, SilentComm, upload_once
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import CuSeqlens, WindowSize
from seqpar.core.device_tables import UploadedTables
from seqpar.core.hooks import hooks
from seqpar.core.memo import LOCAL, Memo
from seqpar.layout.geometry import Geometry
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.layout.replaced import remember
from seqpar.softmax.call import ArgumentKeywords, CallArguments, Causal, Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.resolution import check_most_documents
from seqpar.softmax.strategy import Strategy


def upload_tables(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> None:
    """Copy the tables of forward, and with `backward` of backward, to a device in one copy.

    Prepared tables of backward travel with them. Calls that differ only in their tensors share the
    tables, and only the first one copies them.
    """
    if device.type == "cpu" or hooks.replace_compute is not None:
        return
    if not strategy.rehearses:  # its tables are copied when first needed, on any stream
        UploadedTables((), device).wait()
        return
    rehearsable = _rehearsable(strategy, comm, call, device)
    backward = upload_once(rehearsable, device, backward)
    if call.layout.cut.most_documents:
        key = LOCAL, "remembered", *rehearsable.key, backward
        call.once(key, lambda: _remember(strategy, comm, call, device, backward))


def _remember(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> None:
    """Remember a call, so that the tables of other documents can replace its tables."""
    worst = call.layout.worst_case  # the layout must not hold itself
    without_documents = replace(call, layout=worst, kv_layout=worst, kept=Memo(), max_logits=None)
    silent = SilentComm(comm.rank, comm.size, comm.is_routed)

    def tables(layout: Geometry) -> list[Tensor]:
        of_layout = without_documents.altered(layout=layout, kv_layout=layout)
        return tables_of(strategy, silent, of_layout, device, backward)

    remember(call.layout, device, tables)


def tables_of(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> list[Tensor]:
    """Return the tables of forward, and with `backward` of backward, on the CPU.

    Plans and tables of the call are then kept with its layouts.
    """
    return _rehearsable(strategy, comm, call, device).tables(device, backward)


def _rehearsable(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device
) -> RehearsableCall:
    options = call.options.slopes is not None, call.max_logits is not None
    key = strategy, comm.is_routed, device, call.has_sinks, call.return_lse, *options
    return RehearsableCall(call.kept, key, partial(_run_on_meta, strategy, call, comm.is_routed))


def _run_on_meta(strategy: Strategy, call: ResolvedCall, routed: bool, backward: bool) -> None:
    comm = SilentComm(call.rank, call.ranks, routed)
    shape, rank, meta = call.shape, call.rank, torch.device("meta")
    tokens, kv_tokens = (x.holdings[rank].tokens for x in (call.layout, call.kv_layout))
    q, k, v = (
        torch.empty(shape.batch, *sizes, dtype=shape.dtype, device=meta)
        for sizes in (
            (tokens, shape.heads, shape.dim),
            (kv_tokens, shape.kv_heads, shape.dim),
            (kv_tokens, shape.kv_heads, shape.value_dim),
        )
    )
    sinks = torch.empty(shape.heads, device=meta) if call.has_sinks else None
    if (slopes := call.options.slopes) is not None:
        call = replace(call, options=call.options.with_slopes(slopes.to(meta)))
    if call.max_logits is not None:
        call = replace(call, max_logits=MaxLogits.nothing(q))
    out, lse, residuals = strategy.forward(comm, call, Operands(q, k, v, sinks))
    if not backward:
        return
    if not residuals or strategy.keeps_operands:
        residuals = [q, k, v, out, lse, *residuals]
    dlse = torch.empty_like(lse) if call.return_lse else None
    strategy.backward(comm, call, torch.empty_like(out), dlse, sinks, residuals)


class PreparedOptions(TypedDict, total=False):
    """Further arguments of `Attention.preparation`; most are arguments of a call.

    `sinks` and `alibi_slopes` are whether there are any.
    """

    value_dim: int
    batch: int
    sinks: bool
    alibi_slopes: bool
    causal: Causal
    prefix_lens: CuSeqlens | None
    window_size: WindowSize
    mask: Mask | None
    softmax_scale: float | None
    softcap: float | None
    return_lse: bool
    return_max_logits: bool


@dataclass(frozen=True, kw_only=True)
class SoftmaxPreparation(Preparation):
    strategy: Strategy
    options: ArgumentKeywords  # the other arguments of the call
    deterministic: bool
    has_sinks: bool
    has_slopes: bool

    def _build(self, comm: Comm, layout: Layout) -> None:
        size = self.strategy.merged_size(self.ranks)
        first = self.rank // size * size
        slopes = torch.zeros(self.shape.heads) if self.has_slopes else None  # of any value
        options: ArgumentKeywords = {**self.options, "alibi_slopes": slopes}
        arguments = CallArguments.of(
            "", self.shape.dim, layout, slice(first, first + size), self.deterministic,
            **options,
        )  # fmt: skip
        call = arguments._replace(backend=self.backend).to_call(comm, self.shape, self.has_sinks)
        if layout.geometry.cut.most_documents:
            check_most_documents(self.strategy, arguments.return_max_logits, self.is_routed)
        self.strategy.check(call)
        if arguments.return_max_logits:
            call = replace(call, max_logits=MaxLogits(torch.empty(self.shape.heads)))
        tables_of(self.strategy, comm, call, self.device, self.backward)
