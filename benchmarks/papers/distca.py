"""DistCA: steps with attention moved to idle units, compared with WLB-LLM's packing, on H200."""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks.balance.disaggregated import at_home, packed
from benchmarks.balance.simulated_steps import PUBLISHED, cell
from benchmarks.balance.task_figures import loads
from benchmarks.papers.frame import Paper, Point

CONTEXTS, GPUS, SEEDS = (2**17, 2**18, 2**19), (64, 128, 256, 512), 3
PAPER = "arXiv 2510.18121"
SOURCE = f"{PAPER}, evaluation, against WLB-LLM"
# At 512K: the share of a step that WLB-LLM idles, by replicas, and max/mean of attention of
# documents packed in order, by ranks (the smallest given value).
IDLE = {4: 19.2, 8: 55.4}
UNEVEN = {4: 2.3, 8: 3.0, 32: 4.0}


def uneven(ranks: int, seeds: int = 12) -> float:
    """Return max/mean over ranks of attention's work, averaged over draws of lengths."""
    found = []
    for seed in range(seeds):
        load = loads(at_home(packed("pretrain", ranks, 2**19, seed, cut=True)), ranks)
        found.append(load.max() / load.mean())
    return float(np.mean(found))


def paper(mini: bool = False) -> Paper:
    """Return the range of each table: by their rule, by ours, and over the best WLB-LLM."""
    points = []
    rule = "rule over WLB-LLM"
    for (model, pipeline, lengths), known in PUBLISHED.items():
        if mini and (model, pipeline) != ("8B", False):
            continue
        stages = 4 if pipeline else 1
        contexts, gpus, seeds = ((2**17,), (64,), 1) if mini else (CONTEXTS, GPUS, SEEDS)
        cells = [cell(lengths, model, *x, stages, seeds) for x in product(contexts, gpus)]
        of = f"{model}, {lengths}, {'4 stages' if pipeline else 'no pipeline'}"
        low, high = known.split("–") if "–" in known else ("", known.removeprefix("to "))
        ranges = np.array([[x[rule], x["over WLB-LLM"]] for x in cells])
        if low:
            points.append(Point(f"{of}: its rule, the least", "×", ranges[:, 0].min(), float(low),
                                SOURCE))  # fmt: skip
        points.append(Point(f"{of}: its rule, the most", "×", ranges[:, 0].max(), float(high),
                            SOURCE))  # fmt: skip
        points.append(Point(f"{of}: ours, the most", "×", ranges[:, 1].max()))
    for ranks, value in UNEVEN.items():
        ours = uneven(ranks, 2 if mini else 12)
        of = f"attention's max/mean on {ranks} ranks, packed in order"
        points.append(Point(of, "×", ours, value, f"{PAPER}, imbalance of packing"))
    for replicas, share in IDLE.items():
        idle = cell("pretrain", "8B", 2**19, 8 * replicas, 1, 1 if mini else 12)["idle"]
        of = f"WLB-LLM idles, {replicas} replicas, no context parallelism"
        points.append(Point(of, "%", 100 * idle, share, f"{PAPER}, WLB-LLM at 512K"))
    return Paper("distca", "[DistCA](https://arxiv.org/abs/2510.18121)", tuple(points))
