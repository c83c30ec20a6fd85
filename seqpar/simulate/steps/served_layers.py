"""Record layers of trainers that have whole documents, whose attention servers compute.

Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), section 4: a trainer's documents go through the model in two nano-batches by turns, so that
servers compute for one while the trainer computes with the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.balance.methods.karmarkar_karp import partition
from seqpar.layout.layout import Layout
from seqpar.simulate.recording.program import Program
from seqpar.simulate.recording.serving import RecordedPool, record_served
from seqpar.simulate.steps.attending import Attending, Products
from seqpar.strategies.disaggregated import DisaggregatedAttention


def whole_documents(layout: Layout) -> list[list[int]]:
    """Return the documents that each rank holds; raise a ValueError if one is cut."""
    found = []
    lengths = np.diff(layout.cu_seqlens)
    for rank in range(layout.ranks):
        spans = layout.spans(rank)
        for x in spans:
            if (x.start, x.stop) != (0, lengths[x.document]):
                reason = f"rank {rank} has {x.start} to {x.stop} of document {x.document}"
                raise ValueError(f"layout must have whole documents with servers: {reason}")
        found.append([x.document for x in spans])
    return found


def nano_batches(layout: Layout) -> list[list[list[int]]]:
    """Return each trainer's documents in two nano-batches of about as many tokens; in one, or none.

    A document is in one nano-batch, so two need two documents.
    """
    lengths, found = np.diff(layout.cu_seqlens).astype(np.float64), []
    for documents in whole_documents(layout):
        some = len(documents) > 1
        sets = partition(lengths[documents], 2) if some else [np.arange(len(documents))]
        found.append([[documents[i] for i in sorted(x.tolist())] for x in sets if x.size])
    return found


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
    """Return what trainers and servers do in `count` layers that are alike, forward and backward.

    Args:
        layout: which trainer holds which documents.
        servers: how many there are.
        attending: a layer's attention. Linear layers are computed by trainers alone.
        products: of a layer.
        count: how many layers follow each other.
        copies: as in `record_served`.
        options: of `DisaggregatedAttention` on a pool.
    """
    lengths = np.diff(layout.cu_seqlens)
    batches = [
        [Layout.contiguous(np.r_[0, np.cumsum(lengths[x])], 1) for x in own]
        for own in nano_batches(layout)
    ]

    def step(pool: RecordedPool) -> None:
        own = batches[pool.trainer]
        attn: Any = attending.module(pool.comm)
        if not attending.linear:
            attn = DisaggregatedAttention(pool, **options)

        def begin(x: Tensor, own_layout: Layout) -> Any:
            tokens = own_layout.tokens
            arguments = x, pool, products.flops(tokens), attending.shapes(tokens)
            operands: Any = _Computed.apply(*arguments)
            way = attn if attending.linear else attn.begin
            return way(*operands, own_layout, **attending.call(tokens))

        first = torch.empty(0, dtype=attending.dtype, device="meta", requires_grad=True)
        begun, outs = [begin(first, x) for x in own], list[Tensor]()
        for i in range(count):
            outs = []
            for number, own_layout in enumerate(own):
                out = begun[number] if attending.linear else attn.finish(begun[number])
                outs.append(out)
                if i + 1 < count:
                    begun[number] = begin(out, own_layout)
        if outs:
            torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])

    return record_served(step, layout.ranks, servers, copies=copies)


class _Computed(torch.autograd.Function):
    """A layer's matrix products, as FLOPs, from what the layer before attended to q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pool: RecordedPool, flops: tuple[int, int], shapes: Any
    ) -> tuple[Tensor, ...]:
        ctx.pool, ctx.flops, ctx.shape = pool, flops[1], x.shape
        pool.products(flops[0])
        return tuple(x.new_empty(shape) for shape in shapes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pool.products(ctx.flops)
        return gradients[0].new_empty(ctx.shape), None, None, None
