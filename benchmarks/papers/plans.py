"""Plans of uneven documents: Zeppelin, ByteScale, FCP and Megatron Core's dynamic groups.

Their tables of lengths are not all public, so public distributions (`balance/documents.py`) replace
them. All seconds are those of steps, predicted by the costs of plans.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Any

import numpy as np

from benchmarks.balance.baselines import even_split, hop_seconds, in_order, sequence_edges, static
from benchmarks.balance.documents import draw
from benchmarks.balance.wlb_steps import one_f_one_b
from seqpar import balance
from seqpar.balance import Cluster, Costs, Model
from seqpar.balance.predict.batch import DocumentBatch
from seqpar.costs.grid import Floats

SLACK = 1.25  # room of plans, over the mean tokens
Figures = dict[str, float]


def zeppelin(mini: bool) -> Figures:
    """Return means and extremes over clusters, models, numbers of GPUs and lengths."""
    models = ("llama-3b",) if mini else ("llama-3b", "llama-7b", "llama-13b", "llama-30b")
    ranks = (16,) if mini else (16, 32, 64, 128)
    cells = product(("a800", "h800", "h200"), models, ranks, ("prolong", "github"))
    even, routed, plain, remapped, auto, shared = np.array([_zeppelin_cell(*x) for x in cells]).T
    costs = Costs(Cluster.preset("2x8-a800"), Model.preset("llama-7b"))
    one, four = (1e3 * hop_seconds(costs, 4096, 16, nics) for nics in (1, 4))
    of = "Zeppelin, over an even split"
    return {
        f"{of}, mean": np.mean(even / auto),
        f"{of}, most": np.max(even / auto),
        f"{of}, mean, heads shared": np.mean(even / shared),
        "Zeppelin's routing alone": np.mean(even / routed),
        "Zeppelin's partition and engine, most": np.max(even / plain),
        "Zeppelin's remapping, over no remapping": np.mean(plain / remapped),
        "Zeppelin, a round of the even split, 7B on A800": one,
        "Zeppelin, a round of the even split over 4 NICs, 7B on A800": four,
        f"{of} that is routed, mean": np.mean(even / auto) / np.mean(even / routed),
    }


def _zeppelin_cell(device: str, name: str, ranks: int, lengths: str) -> list[float]:
    """Return seconds: even split, routed, Zeppelin's partition, with remapping, "auto", heads."""
    tokens = 4096  # a GPU
    cluster, model = Cluster.preset(f"{ranks // 8}x8-{device}"), Model.preset(name)
    costs, documents = Costs(cluster, model), draw(lengths, tokens * ranks, tokens * ranks)

    def planned(**options: Any) -> float:
        capacity = int(SLACK * tokens)
        return balance.plan(documents, cluster, model, capacity=capacity, **options).seconds

    return [
        even_split(documents, costs, ranks),
        even_split(documents, costs, ranks, cluster.nics),
        planned(method="zeppelin"),
        planned(method="zeppelin", remap=True),
        planned(),
        planned(heads=next(x for x in (8, 4, 2, 1) if model.kv_heads % x == 0)),
    ]


def bytescale(mini: bool) -> Figures:
    """Return speeds over static data and context parallelism, and the steps of its ablation.

    1,024 H800 and batches of 32M tokens and 16K tokens per rank are assumed, so CP is 128. "at
    most" is the speed of a plan without messages and imbalance.
    """
    cluster, capacity, context = Cluster.preset("128x8-h800"), 2**14, 2**21
    batch, seeds = (2**22, 1) if mini else (2**25, 4)  # seconds of batches are summed
    found = {}
    for lengths, name in product(("github", "byted"), ("llama-8b", "llama-7b")):
        model = Model.preset(name)
        costs, total = Costs(cluster, model), np.zeros(6)
        for seed in range(seeds):
            documents = draw(lengths, batch, context, seed)
            plans = [
                balance.plan(documents, cluster, model, capacity=capacity, **options)
                for options in ({"method": "bytescale"}, {"offload": 1.0}, {"heads": 8})
            ]
            total += [
                static(documents, costs, capacity, context),
                in_order(documents, costs, capacity),
                *(plan.seconds for plan in plans),
                DocumentBatch.of(documents, costs, capacity).ideal,
            ]
        base, sharded, balanced, best, shared, ideal = total
        of = f"{lengths}, 2M, {name}"
        found[f"{of}: over static DP × CP"] = base / best
        found[f"{of}: at most over static DP × CP"] = base / ideal
        found[f"{of}: over static DP × CP, heads=8"] = base / shared
        if lengths == "byted":
            found[f"{of}: step, communication"] = base / sharded
            found[f"{of}: step, balance"] = sharded / balanced
            found[f"{of}: step, offload"] = balanced / best
    return found


def fcp(mini: bool) -> Figures:
    """Return FCP's gains over static degrees, for all batches and for the most uneven one."""
    cluster, model = Cluster.preset("8x8-h100"), Model.preset("qwen3-8b")
    capacity, context = 2**14, 2**17
    batch, seeds = (2**20, 1) if mini else (2**22, 6)
    call = {"capacity": capacity, "micro_batches": ceil(SLACK * batch / capacity / cluster.ranks)}
    costs, rows = Costs(cluster, model), []
    for name, seed in product(("github", "byted", "llama3_sft", "magi"), range(seeds)):
        documents = draw(name, batch, context, seed)
        groups, ours = (
            balance.plan(documents, cluster, model, method=method, **call)
            for method in ("bytescale", "auto")
        )
        base = static(documents, costs, capacity, context)
        rows.append([base, groups.seconds, ours.seconds, groups.bound])
    base, *others = np.array(rows).T
    names = "groups of any size", "our plans", "work shared evenly, nothing sent"
    found = {}
    for name, seconds in zip(names, others, strict=True):
        found[f"{name}, all batches"] = base.sum() / seconds.sum()
        found[f"{name}, the most of a batch"] = (base / seconds).max()
    return found


STAGES, DEGREE, REPLICAS = 8, 8, 4  # of the pipeline; ranks of a fixed group; groups of a stage
BATCHES = 8  # micro-batches of a fixed group


def dynamic_cp(mini: bool) -> Figures:
    """Return dynamic context parallelism's speed over packing at one fixed degree, on GitHub."""
    contexts, seeds = ((2**15,), 1) if mini else ((2**16, 2**17, 2**18), 4)
    names = "groups of 2ⁿ ranks", "our plans", "work shared evenly, nothing sent"
    found = {
        f"GitHub, {context // 1024}K: {name}": float(ratio)
        for context in contexts
        for name, ratio in zip(names, _over_packing("github", context, seeds), strict=True)
    }
    power = [ratio for name, ratio in found.items() if name.endswith(names[0])]
    return {f"{names[0]}, largest speedup": max(power), **found}


def _over_packing(name: str, context: int, seeds: int) -> Floats:
    """Return (3,) speeds over packing: of groups of 2ⁿ ranks, of our plans, and of an ideal."""
    cluster, model = Cluster.preset(f"{REPLICAS}x{DEGREE}-h100"), Model.preset("llama-13b")
    costs, tokens = Costs(cluster, model), BATCHES * REPLICAS * context
    number = ceil(SLACK * tokens / (cluster.ranks * context // DEGREE))
    call, total = {"capacity": context // DEGREE, "micro_batches": number}, np.zeros(4)
    for seed in range(seeds):
        documents = draw(name, tokens, context, seed)
        packs = np.split(documents, sequence_edges(documents, context)[1:-1])
        packed = np.array([even_split(pack, costs, DEGREE) for pack in packs])
        plans = [
            balance.plan(documents, cluster, model, method=method, **call)
            for method in ("power_of_two", "auto")
        ]
        planned = [np.array([x.seconds.max() for x in plan.micro_batches]) for plan in plans]
        total += [
            max(_pipelined(packed[first::REPLICAS]) for first in range(REPLICAS)),
            *(_pipelined(seconds) for seconds in planned),
            _pipelined(np.full(BATCHES, plans[0].bound / BATCHES)),
        ]
    return total[0] / total[1:]


def _pipelined(seconds: Floats) -> float:
    """Return the seconds of micro-batches in the pipeline; forward takes a third of each."""
    return one_f_one_b(np.stack([seconds, 2 * seconds]) / (3 * STAGES), STAGES)
