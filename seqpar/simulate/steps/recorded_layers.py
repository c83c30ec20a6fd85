"""Record the layers of a step: attention and matrix products, on tensors without data.

With attention servers, a trainer divides its documents into two parts, called *nano-batches*.
Servers compute attention for one nano-batch while the trainer computes with the other nano-batch.
See Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.balance.methods.greedy import partition
from seqpar.comm.messages.comm import Comm
from seqpar.costs.model import Layer, Model
from seqpar.layout.layout import Layout
from seqpar.linear.kinds import kind as kind_of
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.recording.program import Begin, Post, Program, Serve, Sizes
from seqpar.simulate.recording.recording import record
from seqpar.simulate.recording.serving import RecordedPool, record_served
from seqpar.softmax.module import Attention
from seqpar.strategies.disaggregated import DisaggregatedAttention
from seqpar.strategies.recurrent import RecurrentAttention
from seqpar.strategies.registry import make_attention


class Products(NamedTuple):
    """The number of weights in the matrices of one layer, from which the FLOPs of the matrix
    products follow.
    """

    weights: float  # the number of weights that are applied to each token
    stored: float  # the number of stored weights, which includes all experts
    backward: int  # the FLOPs of backward, divided by those of forward

    def flops(self, tokens: int) -> tuple[int, int]:
        """Return the FLOPs of forward and of backward for a number of tokens."""
        forward = int(2 * self.weights * tokens)
        return forward, self.backward * forward


@dataclass(frozen=True)
class Attending:
    """The attention of one layer: its operands, arguments and module."""

    model: Model
    layer: Layer
    dtype: torch.dtype  # the dtype of the operands
    transport: str = "all_gather"  # how a linear layer's maps or states are sent

    @property
    def linear(self) -> bool:
        return self.layer.kind == "linear"

    def shapes(self, tokens: int) -> list[tuple[int, int, int]]:
        m, r = self.model, self.model.recurrence
        if self.linear:
            assert r is not None
            keys = tokens, r.key_heads, r.key_dim
            return [keys, keys, (tokens, r.value_heads, r.value_dim)]
        keys = tokens, m.kv_heads, m.head_dim
        return [(tokens, m.heads, m.head_dim), keys, keys]

    def operands(self, tokens: int) -> list[Tensor]:
        """Return new tensors q, k and v of this many tokens, which require gradients."""
        return [self._empty(shape, self.dtype) for shape in self.shapes(tokens)]

    def call(self, tokens: int) -> dict[str, object]:
        """Return the arguments of a call of attention in addition to q, k and v. These are the mask
        of softmax attention, or the gates of linear attention.
        """
        if not self.linear:
            window = -1 if self.layer.window is None else self.layer.window - 1
            return {"causal": True, "window_size": (window, -1)}
        r = self.model.recurrence
        assert r is not None
        kind, heads = kind_of(r.kind), max(r.key_heads, r.value_heads)
        gates: dict[str, object] = {}
        if kind.decay == "constant":
            # LASP-2 and ZeCO read the values of a constant decay, so these need data.
            device = "meta" if self.transport == "tree" else "cpu"
            gates["log_decay"] = torch.full((heads,), -0.1, device=device)
        elif kind.decay is not None:
            key_dims = (r.key_dim,) if kind.decay == "key" else ()
            gates["log_decay"] = self._empty((tokens, heads, *key_dims), torch.float32)
        if kind.uses_beta:
            gates["beta"] = self._empty((tokens, heads), torch.float32)
        return gates

    def module(
        self, comm: Comm, strategy: str = "ring", **options: Any
    ) -> Attention | RecurrentAttention:
        """Return the module that computes the layer's attention. Only a softmax layer uses
        `strategy`.
        """
        if not self.linear:
            return make_attention(strategy, comm, **options)
        assert self.model.recurrence is not None
        return RecurrentAttention(comm, self.model.recurrence.kind, self.transport)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def record_attention(
    candidate: Candidate,
    layout: Layout,
    attending: Attending,
    recompute: bool,
    ordered: bool,
    ranks: tuple[int, ...],
    **options: Any,
) -> list[Program]:
    """Record a layer's attention: forward, forward again if it is recomputed, and backward."""

    def code(comm: Comm) -> None:
        tokens = layout.tokens_on(comm.rank)
        # `forward` is called instead of the module, because global module hooks, such as those of
        # FlopCounterMode, would add operators.
        attn: Any = attending.module(comm, candidate.strategy, **options).forward
        operands, call = attending.operands(tokens), attending.call(tokens)
        if recompute:
            with torch.no_grad():
                attn(*operands, layout, **call)
        out = attn(*operands, layout, **call)
        out.backward(torch.empty_like(out))

    length = 1 if options else ranks_alike(candidate, layout, attending.model)
    firsts = sorted({rank - rank % length for rank in ranks})
    programs = record(code, layout.ranks, mesh=candidate.mesh, only=firsts, ordered=ordered)
    recorded = dict(zip(firsts, programs, strict=True))
    return [
        as_rank(recorded[rank - rank % length], rank - rank % length, rank, length)
        for rank in ranks
    ]


# Recordings are cached, because several configurations need the same recording: those that differ
# only in how activations are kept and, for linear layers, those that differ only in the strategy.
record_attention_once = lru_cache(maxsize=4)(record_attention)


def ranks_alike(candidate: Candidate, layout: Layout, model: Model) -> int:
    """Return the number of consecutive ranks whose programs differ only in the peers of their
    messages. A program is the list of one rank's computations, messages and waits.

    With Ulysses, the result is the number of ranks. With USP, it is the number of ranks in a row of
    the mesh. If these ranks hold different numbers of tokens or of heads, and with all other
    strategies, the result is 1.
    """
    if candidate.strategy == "ulysses":
        length = layout.ranks
    elif candidate.strategy == "usp" and candidate.mesh is not None:
        length = candidate.mesh[1]
    else:
        return 1
    tokens = layout.tokens_per_rank
    runs = [set(tokens[i : i + length]) for i in range(0, layout.ranks, length)]
    return length if model.kv_heads % length == 0 and all(len(x) == 1 for x in runs) else 1


def as_rank(program: Program, recorded: int, rank: int, length: int) -> Program:
    """Return the program of `rank`, made from the recorded program of the rank `recorded`.

    The ranks are divided into groups of `length` consecutive ranks whose programs differ only in
    the peers of their messages. `rank` and `recorded` are in the same group. Each peer is replaced
    by the rank in the peer's group with which `rank` exchanges this message.
    """
    if rank == recorded:
        return program

    def moved(messages: Sizes) -> Sizes:
        shift = rank - recorded
        return tuple(sorted((x - x % length + (x + shift) % length, n) for x, n in messages))

    # Programs of these strategies contain neither a second program nor served programs.
    assert not any(isinstance(x, Begin | Serve) for x in program.actions)
    actions = [
        replace(x, sends=moved(x.sends), recvs=moved(x.recvs)) if isinstance(x, Post) else x
        for x in program.actions
    ]
    return replace(program, actions=actions)


def whole_documents(layout: Layout) -> list[list[int]]:
    """Return the documents that each rank holds. Raises a ValueError if a document is cut."""
    lengths = np.diff(layout.cu_seqlens)
    documents = []
    for rank in range(layout.ranks):
        spans = layout.spans(rank)
        for span in spans:
            if (span.start, span.stop) != (0, lengths[span.document]):
                held = f"rank {rank} has {span.start} to {span.stop} of document {span.document}"
                raise ValueError(f"layout must have whole documents with servers, but {held}")
        documents.append([span.document for span in spans])
    return documents


def nano_batches(layout: Layout) -> list[list[list[int]]]:
    """Return each trainer's documents in two nano-batches of similar length.

    A nano-batch is one of two parts into which a trainer divides its whole documents. A trainer
    with a single document has a single nano-batch.
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
    """Return the programs of trainers and servers for `count` equal, consecutive layers. A program
    is the list of what one process computes, sends and waits for.

    Servers compute softmax attention, and trainers compute linear layers themselves. `copies` says
    whether devices send through host memory. `options` are options of `DisaggregatedAttention` on a
    pool.
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
            call = attn.forward if attending.linear else attn.begin
            return call(*operands, layout, **attending.call(layout.tokens))

        def finish(begun: Any) -> Tensor:
            return begun if isinstance(begun, Tensor) else attn.finish(begun)

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


class _Computed(torch.autograd.Function):
    """An operator that records the matrix products of a layer as FLOPs. Its results are q, k and v
    of the next layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pool.products(ctx.flops)
        return gradients[0].new_empty(ctx.shape), None, None, None
