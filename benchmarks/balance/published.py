"""Compare figures published by Zeppelin and ByteScale with predictions for their clusters.

Their tables of lengths are not all public, so public distributions (`documents.py`) replace them.
The rows list all other assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.balance.baselines import even_split, hop_seconds, in_order, static
from benchmarks.balance.documents import draw
from seqpar import balance
from seqpar.balance.predict.batch import DocumentBatch

# Zeppelin: 4K tokens per GPU on its three clusters. The lengths of its ArXiv data are not public.
DEVICES = ("a800", "h800", "h200")
MODELS = ("llama-3b", "llama-7b", "llama-13b", "llama-30b")
RANKS = (16, 32, 64, 128)
LENGTHS = ("prolong", "github")
TOKENS, SLACK = 4096, 1.25
# ByteScale: 1,024 H800 and batches of 32M tokens and 16K tokens per rank are assumed, so CP is 128.
CLUSTER, CAPACITY, CONTEXT, BATCH = "128x8-h800", 2**14, 2**21, 2**25
SEEDS = 4  # batches, whose seconds are summed

Row = dict[str, Any]


def zeppelin(models: Sequence[str] = MODELS, ranks: Sequence[int] = RANKS) -> list[Row]:
    """Return Zeppelin's rows: means over clusters, models, numbers of GPUs and lengths."""
    cells = product(DEVICES, models, ranks, LENGTHS)
    found = np.array([_zeppelin_cell(*x) for x in cells])
    even, routed, plain, remapped, auto, shared = found.T
    of = "Zeppelin, over an even split"
    costs = balance.Costs(balance.Cluster.preset("2x8-a800"), balance.Model.preset("llama-7b"))
    one, four = (1e3 * hop_seconds(costs, TOKENS, 16, nics) for nics in (1, 4))
    return [
        _row(f"{of}, mean", 2.80, np.mean(even / auto)),
        _row(f"{of}, most", 6.60, np.max(even / auto)),
        _row(f"{of}, mean, heads shared", 2.80, np.mean(even / shared)),
        _row("Zeppelin's routing alone", 1.6, np.mean(even / routed)),
        _row("Zeppelin's partition and engine, most", 3.2, np.max(even / plain)),
        _row("Zeppelin's remapping, over the same without", 3.64 / 3.51, np.mean(plain / remapped)),
        _row("Zeppelin, a round of the even split, 7B on A800, ms", 2.18, one),
        _row("the same over 4 NICs, ms", 0.411, four),
    ]


def _zeppelin_cell(device: str, name: str, ranks: int, lengths: str) -> list[float]:
    """Return seconds: even split, routed, Zeppelin's partition, with remapping, "auto", heads."""
    cluster = balance.Cluster.preset(f"{ranks // 8}x8-{device}")
    model = balance.Model.preset(name)
    costs, documents = balance.Costs(cluster, model), draw(lengths, TOKENS * ranks, TOKENS * ranks)
    call = {"capacity": int(SLACK * TOKENS)}

    def planned(**options: Any) -> float:
        return balance.plan(documents, cluster, model, **call, **options).seconds

    return [
        even_split(documents, costs, ranks),
        even_split(documents, costs, ranks, cluster.nics),
        planned(method="zeppelin"),
        planned(method="zeppelin", remap=True),
        planned(),
        planned(heads=next(x for x in (8, 4, 2, 1) if model.kv_heads % x == 0)),
    ]


def bytescale(lengths: str, seeds: int = SEEDS, batch: int = BATCH) -> list[Row]:
    """Return ByteScale's rows for its GitHub data, or for its own data with its ablation's steps.

    `limit` is the speedup of a plan without messages and imbalance.
    """
    cluster, found = balance.Cluster.preset(CLUSTER), []
    for name in ("llama-8b", "llama-7b"):
        model = balance.Model.preset(name)
        costs = balance.Costs(cluster, model)
        total = np.zeros(6)
        for seed in range(seeds):
            documents = draw(lengths, batch, CONTEXT, seed)
            call = documents, cluster, model
            plans = [
                balance.plan(*call, capacity=CAPACITY, method="bytescale"),
                balance.plan(*call, capacity=CAPACITY, offload=1.0),
                balance.plan(*call, capacity=CAPACITY, heads=8),
            ]
            total += [
                static(documents, costs, CAPACITY, CONTEXT),
                in_order(documents, costs, CAPACITY),
                *(plan.seconds for plan in plans),
                DocumentBatch.of(documents, costs, CAPACITY).ideal,
            ]
        base, sharded, balanced, best, shared, ideal = total
        of, limit = f"ByteScale, {lengths}, 2M, {name}", base / ideal
        published = {"github": 7.89, "byted": 4.26}[lengths]
        over = f"{of}: over static DP × CP"
        found.append(_row(over, published, base / best, limit=limit))
        found.append(_row(f"{over}, heads=8", published, base / shared, limit=limit))
        if lengths == "byted":
            found += [
                _row(f"{of}: step, communication", 1.59, base / sharded),
                _row(f"{of}: step, balance", 3.69 / 2.01, sharded / balanced),
                _row(f"{of}: step, offload", 2.01 / 1.59, balanced / best),
                _row(f"{of}: step, data loader", 3.89 / 3.69, None),
            ]
    return found


def _row(point: str, published: float, ours: float | None, **others: float) -> Row:
    rounded = {k: None if v is None else round(float(v), 3) for k, v in others.items()}
    ours = None if ours is None else round(float(ours), 3)
    return {"point": point, "published": round(published, 3), "ours": ours, **rounded}
