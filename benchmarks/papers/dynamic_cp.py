"""Megatron Core's dynamic context parallelism: its speed over packing at one fixed degree."""

from __future__ import annotations

from benchmarks.balance.baselines import static
from benchmarks.balance.documents import draw
from benchmarks.papers.frame import Paper, Point
from seqpar import balance

CLUSTER, MODEL = balance.Cluster.preset("8x8-h100"), balance.Model.preset("llama-13b")
DEGREE = 8  # ranks of a fixed group: those of a node
SOURCE = "NVIDIA blog, Speeding Up Variable-Length Training with Dynamic Context Parallelism"
SEEDS = 3


def ratios(name: str, context: int, seeds: int, batch: int) -> tuple[float, float]:
    """Return the speed of groups of 2ⁿ ranks, and of our plans, over packing at one degree."""
    costs, capacity = balance.Costs(CLUSTER, MODEL), context // DEGREE
    base = power = best = 0.0
    for seed in range(seeds):
        documents = draw(name, batch, context, seed)
        base += static(documents, costs, capacity, context)
        call = documents, CLUSTER, MODEL
        power += balance.plan(*call, capacity=capacity, method="power_of_two").seconds
        best += balance.plan(*call, capacity=capacity).seconds
    return base / power, base / best


def paper(mini: bool = False) -> Paper:
    """Return the ratios on GitHub's lengths, and on those of fine-tuning."""
    contexts = (2**15,) if mini else (2**15, 2**16, 2**17)
    batch, seeds = (2**20, 1) if mini else (2**24, SEEDS)
    found = {k: ratios("github", k, seeds, batch) for k in contexts}
    points = []
    for context, (power, best) in found.items():
        of = f"GitHub, {context // 1024}K"
        known = (1.48, SOURCE) if context == contexts[-1] else (None, "")
        points.append(Point(f"{of}: groups of 2ⁿ ranks", "×", power, *known))
        points.append(Point(f"{of}: our plans", "×", best))
    return Paper(
        "dynamic_cp",
        "[Megatron Core's dynamic context parallelism](https://developer.nvidia.com/blog/"
        "speeding-up-variable-length-training-with-dynamic-context-parallelism-and-nvidia-megatron-core/)",
        "Llama 13B, lengths of GitHub. Packing fills sequences of the context in order, and cuts "
        "each document over a group of 8 ranks; dynamic groups have as many ranks as a document "
        'needs, a power of two (`method="power_of_two"`).',
        tuple(points),
    )
