"""The FLOPs of a training step, as they are counted for MFU (model FLOPs utilisation)."""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import CuSeqlens, as_lengths
from seqpar.costs.grid import causal_pairs
from seqpar.costs.model import Model


def step_flops(model: Model, lengths: CuSeqlens) -> float:
    """Return the FLOPs of a forward and a backward of a model on documents of these lengths.

    The FLOPs of three kinds of products are counted: products with all weight matrices; products of
    (query, key) pairs that a causal mask or a window allows; and products with the states of linear
    layers. A backward has twice the FLOPs of a forward. Recomputation does not count.

    Args:
        model: the shapes of the model.
        lengths: (documents,) integers. The number of tokens of each document.

    Raises:
        ValueError: if `lengths` are not integers of at least 0.
    """
    documents = as_lengths("lengths", lengths)
    tokens = float(documents.sum())
    forward = tokens * model.flops_per_token
    for layer, count in model.counts.items():
        if layer.kind == "linear":
            forward += count * tokens * 4 * model.state_elements
            continue
        pairs = float(causal_pairs(np.zeros_like(documents), documents, layer.window).sum())
        forward += count * pairs * 4 * model.heads * model.head_dim
    return 3 * forward
