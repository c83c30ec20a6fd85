"""Time attention in virtual time: a strategy's code on a cluster, and one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from seqpar import Layout, make_attention, simulate
from seqpar.balance import Cluster, Tasks
from seqpar.comm.messages.exchange import Comm
from seqpar.costs.grid import causal_pairs


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
