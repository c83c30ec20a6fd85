"""FCP: its speed over static degrees of parallelism, on average and for uneven batches."""

from __future__ import annotations

from math import ceil

import numpy as np

from benchmarks.balance.baselines import static
from benchmarks.balance.documents import draw
from benchmarks.papers.frame import Paper, Point
from seqpar import balance

CLUSTER, MODEL = balance.Cluster.preset("8x8-h100"), balance.Model.preset("qwen3-8b")
CAPACITY, CONTEXT, BATCH = 2**14, 2**17, 2**22
SEEDS, SLACK = 6, 1.25  # batches of each data set; room of plans over the mean tokens
DISTRIBUTIONS = ("github", "byted", "llama3_sft", "magi")
SOURCE = "abstract of arXiv 2602.21788"


def batches(seeds: int, batch: int) -> np.ndarray:
    """Return (batches, 4) seconds: static degrees, groups of any size, our plans, a bound."""
    costs, found = balance.Costs(CLUSTER, MODEL), []
    for name in DISTRIBUTIONS:
        for seed in range(seeds):
            documents = draw(name, batch, CONTEXT, seed)
            number = ceil(SLACK * batch / (CAPACITY * CLUSTER.ranks))
            call = {"capacity": CAPACITY, "micro_batches": number}
            plans = [
                balance.plan(documents, CLUSTER, MODEL, method=method, **call)
                for method in ("bytescale", "auto")
            ]
            base = static(documents, costs, CAPACITY, CONTEXT)
            found.append([base, *(plan.seconds for plan in plans), plans[0].bound])
    return np.array(found)


def paper(mini: bool = False) -> Paper:
    """Return the mean and the largest gains."""
    base, groups, ours, bound = batches(*((1, 2**20) if mini else (SEEDS, BATCH))).T
    points = (
        Point("groups of any size, all batches", "×", base.sum() / groups.sum(), 1.46, SOURCE),
        Point("groups of any size, the most of a batch", "×", (base / groups).max(), 2.24, SOURCE),
        Point("our plans, all batches", "×", base.sum() / ours.sum()),
        Point("our plans, the most of a batch", "×", (base / ours).max()),
        Point("work shared evenly, nothing sent, all batches", "×", base.sum() / bound.sum()),
        Point("work shared evenly, nothing sent, the most of a batch", "×", (base / bound).max()),
    )
    return Paper("fcp", "[FCP](https://arxiv.org/abs/2602.21788)", points)
