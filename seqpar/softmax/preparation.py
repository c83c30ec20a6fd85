"""Build the tables of a module's calls ahead of time, in any process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from seqpar.attention.operands import OperandShape
from seqpar.core.arguments import CuSeqlens, WindowSize, shown
from seqpar.kernels.gpus import Gpu, assume
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.call import ArgumentKeywords, CallArguments, Causal
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.rehearsal import SilentComm, tables_of
from seqpar.softmax.strategy import Strategy


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

    Attributes:
        strategy, rank, ranks, is_routed: the module's strategy, its place, and whether it relays.
        shape: the dtype and sizes of the operands.
        options: the other arguments of the call.
        backend, deterministic: as in `CallArguments`.
        has_sinks, backward: whether the calls have sinks, and a backward.
        device, gpu: the device of the operands, and the facts about it if it is a GPU.
    """

    strategy: Strategy
    rank: int
    ranks: int
    is_routed: bool
    shape: OperandShape
    options: ArgumentKeywords
    backend: str
    deterministic: bool
    has_sinks: bool
    backward: bool
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
