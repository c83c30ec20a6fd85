"""Training steps of papers: their FLOPs, and the least checkpointing that fits into memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from seqpar import Layout, simulate
from seqpar.balance import Cluster, Costs, Model
from seqpar.core.arguments import Ints
from seqpar.costs.costs import CHECKPOINTING
from seqpar.costs.grid import causal_pairs


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
    costs = Costs(cluster, model)
    elsewhere = costs.parameter_bytes(layout.ranks) - costs.parameter_bytes(ranks)
    return found.seconds, float(found.memory.max()) - elsewhere


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
