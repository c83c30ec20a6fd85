"""Attention and training steps in virtual time: a strategy's code, one kernel, and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from seqpar import Layout, make_attention, simulate
from seqpar.balance import Cluster, Costs, Model, Tasks
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import Ints
from seqpar.costs.costs import CHECKPOINTING
from seqpar.costs.grid import causal_pairs
from seqpar.simulate.steps.step_memory import StepMemory


class Shape(NamedTuple):
    """Query heads, KV heads, and head dim."""

    heads: int
    kv_heads: int
    head_dim: int


def attention(
    strategy: str,
    layout: Layout,
    cluster: Cluster,
    shape: Shape,
    backward: bool,
    behind: Callable[[int], object] | None = None,
    mesh: tuple[int, int] | None = None,
    **options: Any,
) -> simulate.Outcome:
    """Return the outcome of a strategy's causal attention, with or without backward.

    Each rank calls `behind` at the end: a contender's additional work, on meta tensors. `mesh` is
    the shape of a strategy's mesh, if it needs one.
    """
    dtype = getattr(torch, cluster.device.dtype)

    def code(comm: Comm) -> None:
        def empty(heads: int) -> torch.Tensor:
            size = layout.tokens_on(comm.rank), heads, shape.head_dim
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=backward)

        q, k, v = empty(shape.heads), empty(shape.kv_heads), empty(shape.kv_heads)
        out = make_attention(strategy, comm, **options)(q, k, v, layout, causal=True)
        if backward:
            out.backward(torch.empty_like(out))
        if behind is not None:
            behind(comm.rank)

    return simulate.play(simulate.record(code, layout.ranks, mesh=mesh), cluster)


def one_kernel(cluster: Cluster, lengths: list[int], shape: Shape, backward: bool) -> float:
    """Return the seconds of one call over whole documents on one device."""
    tasks = Tasks.of(lengths, lengths, causal_pairs([0] * len(lengths), lengths))
    grid = cluster.device.attention
    ways = (False, True) if backward else (False,)
    return sum(float(grid.together(tasks, shape.heads, shape.head_dim, way)[0]) for way in ways)


def flops(model: Model, lengths: Ints, forwards: int = 1, causal: bool = True) -> float:
    """Return the FLOPs of a step: of `forwards` forwards, and a backward that counts twice.

    With `causal`, attention counts the pairs of the mask, otherwise all pairs.
    """
    pairs = causal_pairs(0 * lengths, lengths) if causal else np.square(lengths.astype(float))
    attention = 4 * model.heads * model.head_dim * len(model.layers) * float(pairs.sum())
    return (forwards + 2) * (model.flops_per_token * float(lengths.sum()) + attention)


def sharded(
    strategy: str,
    layout: Layout,
    cluster: Cluster,
    model: Model,
    checkpointing: str,
    ranks: int,
    **options: Any,
) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes of the rank with the most.

    Parameters and optimizer are sharded over `ranks` ranks; the layout covers some of them.
    """
    found = simulate.step(strategy, layout, cluster, model, checkpointing=checkpointing, **options)
    held = StepMemory.over_layers(Costs(cluster, model), checkpointing, ranks)
    return found.seconds, float(held.on(found.held.tokens, found.held.temporary).peak().max())


def least_checkpointing(
    strategy: str, layout: Layout, cluster: Cluster, model: Model, **options: Any
) -> tuple[str, float]:
    """Return the least checkpointing that fits into memory, and its seconds."""
    for checkpointing in CHECKPOINTING:
        seconds, held = sharded(
            strategy, layout, cluster, model, checkpointing, layout.ranks, **options
        )
        if held <= cluster.device.memory:
            return checkpointing, seconds
    raise ValueError(f"layout: {strategy} does not fit with any checkpointing")
