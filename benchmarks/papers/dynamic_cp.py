"""Megatron Core's dynamic context parallelism: its speed over packing at one fixed degree."""

from __future__ import annotations

from math import ceil

import numpy as np

from benchmarks.balance.baselines import even_split, sequence_edges
from benchmarks.balance.documents import draw
from benchmarks.balance.wlb_steps import one_f_one_b
from benchmarks.papers.frame import Paper, Point
from seqpar import balance
from seqpar.balance import Cluster, Costs, Model
from seqpar.costs.grid import Floats

STAGES, DEGREE, REPLICAS = 8, 8, 4  # of the pipeline; ranks of a fixed group; groups of a stage
CLUSTER, MODEL = Cluster.preset(f"{REPLICAS}x{DEGREE}-h100"), Model.preset("llama-13b")
SLACK = 1.25  # tokens for which plans have room, over the tokens
BATCHES = 8  # micro-batches of a fixed group
BLOG = (
    "https://developer.nvidia.com/blog/speeding-up-variable-length-training-with-dynamic-context-"
    "parallelism-and-nvidia-megatron-core/"
)
SOURCE = "introduction"


def pipelined(seconds: Floats) -> float:
    """Return the seconds of micro-batches in the pipeline; forward takes a third of each."""
    return one_f_one_b(np.stack([seconds, 2 * seconds]) / (3 * STAGES), STAGES)


def ratios(name: str, context: int, seeds: int) -> Floats:
    """Return (3,) speeds over packing: of groups of 2ⁿ ranks, of our plans, and of an ideal."""
    costs, tokens = Costs(CLUSTER, MODEL), BATCHES * REPLICAS * context
    total = np.zeros(4)
    for seed in range(seeds):
        documents = draw(name, tokens, context, seed)
        packs = np.split(documents, sequence_edges(documents, context)[1:-1])
        packed = np.array([even_split(pack, costs, DEGREE) for pack in packs])
        number = ceil(SLACK * tokens / (CLUSTER.ranks * context // DEGREE))
        call = {"capacity": context // DEGREE, "micro_batches": number}
        plans = [
            balance.plan(documents, CLUSTER, MODEL, method=method, **call)
            for method in ("power_of_two", "auto")
        ]
        planned = [np.array([x.seconds.max() for x in plan.micro_batches]) for plan in plans]
        total += [
            max(pipelined(packed[first::REPLICAS]) for first in range(REPLICAS)),
            *(pipelined(seconds) for seconds in planned),
            pipelined(np.full(BATCHES, plans[0].bound / BATCHES)),
        ]
    return total[0] / total[1:]


def paper(mini: bool = False) -> Paper:
    """Return the ratios on GitHub's lengths."""
    contexts, seeds = ((2**15,), 1) if mini else ((2**16, 2**17, 2**18), 4)
    found = {context: ratios("github", context, seeds) for context in contexts}
    points = []
    for context, (power, ours, most) in found.items():
        of = f"GitHub, {context // 1024}K"
        points.append(Point(f"{of}: groups of 2ⁿ ranks", "×", power))
        points.append(Point(f"{of}: our plans", "×", ours))
        points.append(Point(f"{of}: work shared evenly, nothing sent", "×", most))
    highest = max(power for power, _, _ in found.values())
    points.insert(0, Point("groups of 2ⁿ ranks, the most", "×", highest, 1.48, SOURCE))
    return Paper(
        "dynamic_cp", f"[Megatron Core's dynamic context parallelism]({BLOG})", tuple(points)
    )
