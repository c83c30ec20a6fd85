"""LightSeq (DistFlashAttention): its speed over Megatron-LM's and others', on 8 and 16 A100."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np

from benchmarks.papers import megatron
from seqpar import Layout, simulate
from seqpar.balance import Cluster, Model

K = 1024
LLAMA = Model.preset("llama-7b")
MODELS = {
    "7B": LLAMA,
    "7B, 8 heads of keys": replace(LLAMA, kv_heads=8),
    "33 heads": replace(LLAMA, heads=33, kv_heads=33, hidden=33 * 128),
}
TOKENS = (4 * K, 8 * K, 16 * K, 32 * K)  # per GPU: 32K to 512K in total


def seconds(strategy: str, layout: str, model: Model, nodes: int, tokens: int, kept: str) -> float:
    """Return the seconds of a step of one sequence."""
    cluster = Cluster.preset(f"{nodes}x8-a100")
    cut = getattr(Layout, layout)(tokens * cluster.ranks, cluster.ranks)
    return simulate.step(strategy, cut, cluster, model, checkpointing=kept).seconds


def padded(model: Model, ranks: int) -> Model:
    """Return a model with heads padded to a multiple of the ranks."""
    heads = ranks * ceil(model.heads / ranks)
    return model if heads == model.heads else replace(model, heads=heads, kv_heads=heads)


def times(name: str, nodes: int, tokens: int) -> dict[str, float]:
    """Return each contender's seconds over ours, in one cell."""
    model, ranks, cluster = MODELS[name], 8 * nodes, Cluster.preset(f"{nodes}x8-a100")
    lengths, call = np.array([tokens * ranks]), (nodes, tokens)
    found = {
        "megatron": megatron.step(lengths, ranks, cluster, model),
        "ring": seconds("ring", "contiguous", model, *call, "full"),
        "ulysses": seconds("ulysses", "contiguous", padded(model, ranks), *call, "full"),
        "full": seconds("ring", "zigzag", model, *call, "full"),
    }
    if model.heads % ranks == 0:
        found["fair"] = megatron.step(lengths, ranks, cluster, model, "attention")
    ours = seconds("ring", "zigzag", model, *call, "attention")
    return {contender: x / ours for contender, x in found.items()}


def predict(mini: bool) -> dict[str, float]:
    """Return ratios over each baseline: their ranges over models, nodes and lengths."""
    cells = [("7B", 1, 4 * K)] if mini else [*product(MODELS, (1, 2), TOKENS)]
    found = {x: times(*x) for x in cells}

    def every(contender: str) -> np.ndarray:
        return np.array([x[contender] for x in found.values() if contender in x])

    figures = {
        "smallest speedup over Megatron-LM": every("megatron").min(),
        "largest speedup over Megatron-LM": every("megatron").max(),
        "largest speedup over Ring Attention": every("ring").max(),
        "smallest speedup over Ulysses": every("ulysses").min(),
        "largest speedup over Ulysses": every("ulysses").max(),
        "largest speedup over LightSeq with full checkpointing": every("full").max(),
        "largest speedup over Megatron-LM without recomputed attention": every("fair").max(),
    }
    longest = max(tokens for _, _, tokens in cells)
    for (name, nodes, tokens), ratio in found.items():
        if tokens == longest:
            of = f"{name}, {8 * nodes} GPUs, {tokens // K}K tokens each"
            figures[f"{of}: over Megatron-LM"] = ratio["megatron"]
    return figures
