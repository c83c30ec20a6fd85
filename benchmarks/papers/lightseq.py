"""LightSeq (DistFlashAttention): its speed over Megatron-LM's and over others', on 8 and 16 A100."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np

from benchmarks.papers import megatron
from benchmarks.papers.frame import Paper, Point
from seqpar import Layout, simulate
from seqpar.balance import Cluster, Model

K = 1024
LLAMA = Model.preset("llama-7b")
MODELS = {
    "7B": LLAMA,
    "7B, 8 heads of keys": replace(LLAMA, kv_heads=8),
    "33 heads": replace(LLAMA, heads=33, kv_heads=33, hidden=33 * 128),
}
TOKENS = (4 * K, 8 * K, 16 * K, 32 * K)  # a GPU: 32K to 512K in all
SOURCE = "abstract of arXiv 2310.03294"


def seconds(strategy: str, layout: str, model: Model, nodes: int, tokens: int, kept: str) -> float:
    """Return the seconds of a step of one sequence."""
    cluster = Cluster.preset(f"{nodes}x8-a100")
    cut = getattr(Layout, layout)(tokens * cluster.ranks, cluster.ranks)
    return simulate.step(strategy, cut, cluster, model, checkpointing=kept).seconds


def padded(model: Model, ranks: int) -> Model:
    """Return a model whose heads ranks can share."""
    heads = ranks * ceil(model.heads / ranks)
    return model if heads == model.heads else replace(model, heads=heads, kv_heads=heads)


def paper(mini: bool = False) -> Paper:
    """Return ratios over each baseline: their ranges over models, nodes and lengths."""
    cells = [("33 heads", 1, 4 * K)] if mini else [*product(MODELS, (1, 2), TOKENS)]
    found: dict[str, list[float]] = {}
    for name, nodes, tokens in cells:
        model, ranks = MODELS[name], 8 * nodes
        cluster, lengths = Cluster.preset(f"{nodes}x8-a100"), np.array([tokens * ranks])
        call = model, nodes, tokens
        ours = seconds("ring", "zigzag", *call, "attention")
        others = {
            "megatron": megatron.step(lengths, ranks, cluster, model).seconds,
            "even": megatron.step(lengths, ranks, cluster, model, "attention").seconds
            if model.heads % ranks == 0
            else None,
            "checkpointing": seconds("ring", "zigzag", *call, "full"),
            "ring": seconds("ring", "contiguous", *call, "full"),
            "ulysses": seconds("ulysses", "contiguous", padded(model, ranks), *call[1:], "full"),
        }
        for key, other in others.items():
            if other is not None:
                found.setdefault(key, []).append(other / ours)
    ratio = {key: np.array(values) for key, values in found.items()}
    points = [
        Point("over Megatron-LM, the least", "×", ratio["megatron"].min(), 1.24, SOURCE),
        Point("over Megatron-LM, the most", "×", ratio["megatron"].max(), 2.01, SOURCE),
    ]
    if "even" in ratio:
        even = ratio["even"]
        name = "over Megatron-LM, heads that divide, attention not computed again"
        points.append(Point(f"{name}: the least", "×", even.min()))
        points.append(Point(f"{name}: the most", "×", even.max()))
    points += [
        Point("over Ring Attention, the most", "×", ratio["ring"].max(), 1.67, SOURCE),
        Point("over Ulysses, the least", "×", ratio["ulysses"].min(), 1.26, SOURCE),
        Point("over Ulysses, the most", "×", ratio["ulysses"].max(), 1.88, SOURCE),
        Point("over the same with full checkpointing, the most", "×",
              ratio["checkpointing"].max()),
    ]  # fmt: skip
    return Paper(
        "lightseq",
        "[LightSeq](https://arxiv.org/abs/2310.03294)",
        "Llama 7B, the same with 8 heads of keys and values, and with 33 heads, on one and two "
        "nodes of 8 A100, 4K to 32K tokens a GPU. LightSeq is our zigzag Ring with attention's "
        'results kept (checkpointing "attention"). Megatron-LM, Ring Attention and Ulysses compute '
        "all of a layer again; the first and the last pad 33 heads to a multiple of the ranks.",
        tuple(points),
    )
