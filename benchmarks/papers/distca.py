"""DistCA: steps with attention moved to whoever has time, beside WLB-LLM's packing, on H200."""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks.balance.simulated_steps import PUBLISHED, cell
from benchmarks.papers.frame import Paper, Point

CONTEXTS, GPUS, SEEDS = (2**17, 2**18, 2**19), (64, 128, 256, 512), 1
SOURCE = "arXiv 2510.18121, evaluation, against WLB-LLM"


def paper(mini: bool = False) -> Paper:
    """Return the range of each table: by their rule, by ours, and over WLB-LLM as it could be."""
    points = []
    rule = "rule over WLB-LLM"
    for (model, pipeline, lengths), known in PUBLISHED.items():
        if mini and (model, pipeline) != ("8B", False):
            continue
        stages = 4 if pipeline else 1
        contexts, gpus = ((2**17,), (64,)) if mini else (CONTEXTS, GPUS)
        cells = [cell(lengths, model, *x, stages, SEEDS) for x in product(contexts, gpus)]
        of = f"{model}, {lengths}, {'4 stages' if pipeline else 'no pipeline'}"
        low, high = known.split("–") if "–" in known else ("", known.removeprefix("to "))
        ranges = np.array([[x[rule], x["over WLB-LLM"]] for x in cells])
        alone = np.array([x["WLB-LLM"] / x["DistCA's rule"] / (1 - x["idle"]) for x in cells])
        if low:
            points.append(Point(f"{of}: its rule, the least", "×", ranges[:, 0].min(), float(low),
                                SOURCE))  # fmt: skip
        points.append(Point(f"{of}: its rule, the most", "×", ranges[:, 0].max(), float(high),
                            SOURCE))  # fmt: skip
        points.append(Point(f"{of}: ours, the most", "×", ranges[:, 1].max()))
        del alone
    return Paper(
        "distca",
        "[DistCA](https://arxiv.org/abs/2510.18121)",
        "64 to 512 H200 in units of 8 that share tensors' heads, contexts of 128K to 512K, lengths "
        "of Pretrain and ProLong; steps are predicted by `benchmarks.balance.simulated_steps`. The "
        "baseline is WLB-LLM without deferring documents, with the best size of context parallel "
        "groups by predicted time.",
        tuple(points),
    )
