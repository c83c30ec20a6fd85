"""Whole training steps of papers: their FLOPs, and the least checkpointing with which they fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from seqpar import Layout, simulate
from seqpar.balance import Cluster, Costs, Model
from seqpar.core.arguments import Ints
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.spans import causal_pairs


def flops(model: Model, lengths: Ints, forwards: int = 1, causal: bool = True) -> float:
    """Return the FLOPs of a step: so many forwards, and a backward, which has twice as many.

    With `causal` attention's are those of the pairs that see each other, else those of all pairs.
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
    """Return the seconds of a step, and the bytes of the rank that holds most.

    Parameters and optimizer are sharded over `ranks` ranks, of which the layout has a part.
    """
    found = simulate.step(strategy, layout, cluster, model, checkpointing=checkpointing, **options)
    costs = Costs(cluster, model)
    elsewhere = costs.parameter_bytes(layout.ranks) - costs.parameter_bytes(ranks)
    return found.seconds, float(found.memory.max()) - elsewhere


def least_checkpointing(
    strategy: str, layout: Layout, cluster: Cluster, model: Model, **options: Any
) -> tuple[str, float]:
    """Return the least checkpointing with which a step fits into memory, and its seconds."""
    for checkpointing in CHECKPOINTING:
        seconds, held = sharded(
            strategy, layout, cluster, model, checkpointing, layout.ranks, **options
        )
        if held <= cluster.device.memory:
            return checkpointing, seconds
    raise ValueError(f"layout: {strategy} does not fit with any checkpointing")
