"""Record layers of trainers that hold whole documents while attention servers compute.

Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), section 4: a trainer alternates between two nano-batches of its documents, so that servers
compute for one while the trainer computes with the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.balance.methods.greedy import partition
from seqpar.layout.layout import Layout
from seqpar.simulate.recording.program import Program
from seqpar.simulate.recording.serving import RecordedPool, record_served
from seqpar.simulate.steps.attending import Attending, Products
from seqpar.strategies.disaggregated import DisaggregatedAttention


def whole_documents(layout: Layout) -> list[list[int]]:
    """Return the documents that each rank holds; raise a ValueError if one is cut."""
    lengths = np.diff(layout.cu_seqlens)
    documents = []
    for rank in range(layout.ranks):
        spans = layout.spans(rank)
        for span in spans:
            if (span.start, span.stop) != (0, lengths[span.document]):
                held = f"rank {rank} has {span.start} to {span.stop} of document {span.document}"
                raise ValueError(f"layout must have whole documents with servers: {held}")
        documents.append([span.document for span in spans])
    return documents


def nano_batches(layout: Layout) -> list[list[list[int]]]:
    """Return each trainer's documents in two nano-batches of similar length.

    A document is never cut, so a trainer with one document has one nano-batch, and a trainer
    without documents none.
    """
    lengths = np.diff(layout.cu_seqlens).astype(np.float64)
    batches = []
    for documents in whole_documents(layout):
        if len(documents) > 1:
            halves = partition(lengths[documents], 2)
        else:
            halves = [np.arange(len(documents))]
        batches.append([[documents[i] for i in sorted(x.tolist())] for x in halves if x.size])
    return batches


def record_layers(
    layout: Layout,
    servers: int,
    attending: Attending,
    products: Products,
    count: int,
    *,
    copies: bool,
    **options: Any,
) -> list[Program]:
    """Return the programs of trainers and servers for `count` equal, consecutive layers.

    Servers take tasks in order of arrival. By task number, trainers with few tasks would delay
    trainers with many.

    Args:
        layout: which trainer holds which documents.
        servers: the number of servers.
        attending: a layer's attention. Trainers compute linear layers themselves.
        products: a layer's matrix products.
        count: the number of layers, forward and backward.
        copies: as in `record_served`.
        options: options of `DisaggregatedAttention` on a pool.
    """
    lengths = np.diff(layout.cu_seqlens)
    batches = [
        [Layout.contiguous(np.r_[0, np.cumsum(lengths[batch])], 1) for batch in own]
        for own in nano_batches(layout)
    ]

    def step(pool: RecordedPool) -> None:
        layouts = batches[pool.trainer]
        attn: Any = attending.module(pool.comm)
        if not attending.linear:
            attn = DisaggregatedAttention(pool, **options)

        def begin(x: Tensor, layout: Layout) -> object:
            shapes = attending.shapes(layout.tokens)
            operands = _Computed.apply(x, pool, products.flops(layout.tokens), shapes)
            call = attn if attending.linear else attn.begin
            return call(*operands, layout, **attending.call(layout.tokens))

        def finish(begun: object) -> Tensor:
            out: Tensor = begun if isinstance(begun, Tensor) else attn.finish(begun)
            return out

        first = torch.empty(0, dtype=attending.dtype, device="meta", requires_grad=True)
        begun = [begin(first, layout) for layout in layouts]
        outs: list[Tensor] = []
        for i in range(count):
            outs = []
            for number, layout in enumerate(layouts):
                out = finish(begun[number])
                outs.append(out)
                if i + 1 < count:
                    begun[number] = begin(out, layout)
        if outs:
            torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])

    return record_served(step, layout.ranks, servers, copies=copies)


class _ComputedContext(FunctionCtx):
    pool: RecordedPool
    flops: int
    shape: torch.Size


class _Computed(torch.autograd.Function):
    """A layer's matrix products, counted as FLOPs; its results are the next attention's q, k, v."""

    @staticmethod
    def forward(
        ctx: _ComputedContext,
        x: Tensor,
        pool: RecordedPool,
        flops: tuple[int, int],
        shapes: list[tuple[int, int, int]],
    ) -> tuple[Tensor, ...]:
        forward, backward = flops
        ctx.pool, ctx.flops, ctx.shape = pool, backward, x.shape
        pool.products(forward)
        return tuple(x.new_empty(shape) for shape in shapes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _ComputedContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pool.products(ctx.flops)
        return gradients[0].new_empty(ctx.shape), None, None, None
