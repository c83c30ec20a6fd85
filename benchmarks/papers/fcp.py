"""FCP: its speed over static degrees of parallelism, in the mean and for the most uneven batches."""

from __future__ import annotations

import numpy as np

from benchmarks.balance.baselines import static
from benchmarks.balance.documents import draw
from benchmarks.papers.frame import Paper, Point
from seqpar import balance

CLUSTER, MODEL = balance.Cluster.preset("8x8-h100"), balance.Model.preset("qwen3-8b")
CAPACITY, CONTEXT, BATCH = 2**14, 2**17, 2**22
SEEDS = 6
DISTRIBUTIONS = ("github", "byted", "llama3_sft", "magi")
SOURCE = "abstract of arXiv 2602.21788"


def batches(seeds: int, batch: int) -> np.ndarray:
    """Return (batches, 3) seconds: static degrees, groups of any size, and our plans."""
    costs, found = balance.Costs(CLUSTER, MODEL), []
    for name in DISTRIBUTIONS:
        for seed in range(seeds):
            documents = draw(name, batch, CONTEXT, seed)
            call = documents, CLUSTER, MODEL
            found.append([
                static(documents, costs, CAPACITY, CONTEXT),
                balance.plan(*call, capacity=CAPACITY, method="bytescale").seconds,
                balance.plan(*call, capacity=CAPACITY).seconds,
            ])  # fmt: skip
    return np.array(found)


def paper(mini: bool = False) -> Paper:
    """Return the mean and the most."""
    base, groups, ours = batches(*((1, 2**20) if mini else (SEEDS, BATCH))).T
    points = (
        Point("groups of any size, all batches", "×", base.sum() / groups.sum(), 1.46, SOURCE),
        Point("groups of any size, the most of a batch", "×", (base / groups).max(), 2.24, SOURCE),
        Point("our plans, all batches", "×", base.sum() / ours.sum()),
        Point("our plans, the most of a batch", "×", (base / ours).max()),
    )
    return Paper(
        "fcp",
        "[FCP](https://arxiv.org/abs/2602.21788)",
        "Static DP × CP, with a group for the longest document, beside groups of any number of "
        "ranks, powers of two or not.",
        points,
    )
