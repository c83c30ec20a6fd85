"""DistCA: steps with attention moved to idle units, compared with WLB-LLM's packing, on H200."""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks.balance.disaggregated import at_home, packed
from benchmarks.balance.simulated_steps import PUBLISHED, cell
from benchmarks.balance.task_figures import loads

CONTEXTS, GPUS, SEEDS = (2**17, 2**18, 2**19), (64, 128, 256, 512), 3


def uneven(ranks: int, seeds: int = 12) -> float:
    """Return max/mean over ranks of attention's work, averaged over draws of lengths."""
    found = []
    for seed in range(seeds):
        load = loads(at_home(packed("pretrain", ranks, 2**19, seed, cut=True)), ranks)
        found.append(load.max() / load.mean())
    return float(np.mean(found))


def predict(mini: bool) -> dict[str, float]:
    """Return the range of each table: by their rule, by ours, and over the best WLB-LLM."""
    found = {}
    for (model, pipeline, lengths), known in PUBLISHED.items():
        if mini and (model, pipeline) != ("8B", False):
            continue
        stages = 4 if pipeline else 1
        contexts, gpus, seeds = ((2**17,), (64,), 1) if mini else (CONTEXTS, GPUS, SEEDS)
        cells = [cell(lengths, model, *x, stages, seeds) for x in product(contexts, gpus)]
        of = f"{model}, {lengths}, {'4 stages' if pipeline else 'no pipeline'}"
        rule, ours = ([x[of] for x in cells] for of in ("rule over WLB-LLM", "over WLB-LLM"))
        if "–" in known:  # a range
            found[f"{of}: DistCA's rule, smallest speedup"] = min(rule)
        found |= {
            f"{of}: DistCA's rule, largest speedup": max(rule),
            f"{of}: our plans, largest speedup": max(ours),
        }
    for ranks in (4, 8, 32):
        of = f"attention's max/mean on {ranks} ranks, packed in order"
        found[of] = uneven(ranks, 2 if mini else 12)
    for replicas in (4, 8):
        idle = cell("pretrain", "8B", 2**19, 8 * replicas, 1, 1 if mini else 12)["idle"]
        found[f"WLB-LLM idles, {replicas} replicas, no context parallelism"] = 100 * idle
    return found
