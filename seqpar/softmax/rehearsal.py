"""Find the tables of a call before it begins, and send them to the device in one copy.

A rehearsal runs the strategy's forward and backward on meta tensors. Nothing is computed or sent. A
`Preparation` rehearses a module's calls ahead of time, in any process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message
from seqpar.core.arguments import CuSeqlens, WindowSize, shown
from seqpar.core.device_tables import rehearse, upload
from seqpar.core.hooks import hooks
from seqpar.core.memo import LOCAL
from seqpar.kernels.gpus import Gpu, assume
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.call import ArgumentKeywords, CallArguments, Causal, Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.strategy import Strategy

_copied: dict[torch.device, dict[torch.cuda.Stream, torch.cuda.Event]] = {}  # each last copy


class UploadedTables:
    def __init__(self, tables: Iterable[Tensor], device: torch.device) -> None:
        self._device, self._memory = device, upload(tables, device)
        events = _copied.setdefault(device, {})
        if self._memory is not None and self._memory.is_cuda:
            stream = torch.cuda.current_stream(device)
            events[stream] = stream.record_event()
        self._events = dict(events)  # other calls may have copied some of the tables

    def wait(self) -> None:
        """Make the current stream wait for copies that other streams made."""
        if not self._events or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        for stream, event in self._events.items():
            if stream != current:
                current.wait_event(event)
                if self._memory is not None:
                    self._memory.record_stream(current)


def upload_tables(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> None:
    """Copy the tables of forward, and with `backward` of backward, to a device in one copy.

    Calls that differ only in their tensors share the tables, and only the first one copies them.
    """
    if device.type == "cpu" or not strategy.rehearses or hooks.replace_compute is not None:
        return

    key = _key(strategy, comm, call, device, backward)

    def build() -> UploadedTables:
        return UploadedTables(tables_of(strategy, comm, call, device, backward), device)

    call.once((LOCAL, "uploaded tables", *key), build).wait()


def tables_of(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> list[Tensor]:
    """Return the tables of forward, and with `backward` of backward, on the CPU.

    Plans and tables of the call are then kept with its layouts.
    """

    def build() -> list[Tensor]:
        with rehearse(device) as rehearsal:
            _run_on_meta(strategy, call, comm.is_routed, backward)
        return list(rehearsal.tables.values())

    return call.once(("tables", *_key(strategy, comm, call, device, backward)), build)


def _key(
    strategy: Strategy, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
) -> tuple[Hashable, ...]:
    options = call.options.slopes is not None, call.max_logits is not None
    results = call.has_sinks, call.return_lse
    return strategy, comm.is_routed, device, backward, *results, *options


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


class SilentComm(Comm):
    """The ranks of a group, without messages."""

    def __init__(self, rank: int, size: int, is_routed: bool) -> None:
        super().__init__("silent", rank, size)
        self._is_routed = is_routed

    @property
    def is_routed(self) -> bool:
        return self._is_routed

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        return Pending([], [])

    def channel(self, name: str) -> Comm:
        return self


class PreparedOptions(TypedDict, total=False):
    """Further arguments of `Attention.preparation`; most are arguments of a call."""

    value_dim: int
    batch: int
    sinks: bool
    causal: Causal
    prefix_lens: CuSeqlens | None
    window_size: WindowSize
    mask: Mask | None
    softmax_scale: float | None
    softcap: float | None
    return_lse: bool
    return_max_logits: bool


@dataclass(frozen=True)
class Preparation:
    """Builds the tables of one kind of call ahead of time.

    It can be pickled and called in any process: `preparation(layout)` builds the tables of the
    layout, and returns the layout.
    """

    # strategy, rank, ranks, is_routed: the module's strategy, its place, and whether it relays
    strategy: Strategy
    rank: int
    ranks: int
    is_routed: bool
    shape: OperandShape  # the dtype and sizes of the operands
    options: ArgumentKeywords  # the other arguments of the call
    # backend, deterministic: as in `CallArguments`
    backend: str
    deterministic: bool
    # has_sinks, backward: whether the calls have sinks, and a backward
    has_sinks: bool
    backward: bool
    # device, gpu: the device of the operands, and the facts about it if it is a GPU
    device: torch.device
    gpu: Gpu | None

    def __call__(self, layout: Layout) -> Layout:
        """Build the tables of a layout, which keeps them and takes them along when it is pickled.

        Raise a ValueError if the call would be refused with this layout.
        """
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be a seqpar.Layout, got {shown(layout)}")
        if self.gpu is not None:
            assume(self.device, self.gpu)
        comm = SilentComm(self.rank, self.ranks, self.is_routed)
        size = self.strategy.merged_size(self.ranks)
        first = self.rank // size * size
        arguments = CallArguments.of(
            "", self.shape.dim, layout, slice(first, first + size), self.deterministic,
            **self.options,
        )  # fmt: skip
        call = arguments._replace(backend=self.backend).to_call(comm, self.shape, self.has_sinks)
        self.strategy.check(call)
        if arguments.return_max_logits:
            call = replace(call, max_logits=MaxLogits(torch.empty(self.shape.heads)))
        tables_of(self.strategy, comm, call, self.device, self.backward)
        return layout._with_tables()
