"""Measure how close plans are to the bound, and how long planning takes.

Steps are simulated: their seconds are predicted (`seqpar.costs`) on preset clusters, without a GPU.
Planning is real, and its time is CPU time of this machine's core. Each cell has a distribution of
lengths, a longest document (the context) and a number of ranks. A rank has the tokens of the
context, at most 512K, and capacity for a quarter more.
"""

from __future__ import annotations

import itertools
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.balance.documents import DISTRIBUTIONS, draw
from seqpar import balance
from seqpar.core.arguments import Ints
from seqpar.costs.grid import causal_pairs

CONTEXTS = {"128K": 2**17, "512K": 2**19, "2M": 2**21}
RANKS = (8, 32, 256, 2048, 12288)
MOST_TOKENS, SLACK = 2**19, 1.25
MOST_DOCUMENTS = 250_000  # cells with more are left out
MOST_PAIRS = 2**17  # documents × ranks up to which Karmarkar–Karp is tried
PLANNED, REPEATS = ((64, 6000), (512, 100_000)), 7  # nodes of 8, and documents
MOST_REMAPPED = 32  # ranks up to which plans with remapping are made too
MODEL, DEVICE = "llama-8b", "h100"


def cell_of(name: str, context: int, ranks: int) -> dict[str, Any] | None:
    """Return one cell: each method's predicted seconds over the bound, and seconds of planning."""
    tokens = min(context, MOST_TOKENS)
    expected = draw(name, 2**22, context).size * tokens * ranks / 2**22
    if expected > MOST_DOCUMENTS:
        return None
    lengths, capacity = draw(name, tokens * ranks, context), int(SLACK * tokens)
    cluster = balance.Cluster.preset(f"{ranks // 8}x8-{DEVICE}")
    model, cell = balance.Model.preset(MODEL), {"documents": lengths.size, "tokens": tokens}
    methods: dict[str, Any] = {}
    for method in (*balance.METHODS, "auto"):
        if method == "karmarkar_karp" and lengths.size * ranks > MOST_PAIRS:
            continue
        begin = time.process_time()
        plan = balance.plan(lengths, cluster, model, capacity=capacity, method=method)
        took = time.process_time() - begin
        check(plan, lengths, capacity)
        methods[method] = {
            "seconds": plan.seconds,
            "over_bound": plan.seconds / plan.bound,
            "planning": took,
            "micro_batches": len(plan.micro_batches),
        }
    methods["auto"] |= {"attention": imbalance(plan), "chosen": plan.method}
    if ranks <= MOST_REMAPPED:
        plan = balance.plan(lengths, cluster, model, capacity=capacity, remap=True)
        check(plan, lengths, capacity)
        ratio = plan.seconds / plan.bound
        cell["remap"] = {"over_bound": ratio, "attention": imbalance(plan)}
    return {**cell, "bound": plan.bound, "methods": methods}


def check(plan: balance.Plan, lengths: Ints, capacity: int) -> None:
    """Refuse a plan that loses a document or a token, or has a rank over its capacity."""
    documents = np.sort(np.concatenate([batch.documents for batch in plan.micro_batches]))
    held = sum(int(batch.tokens.sum()) for batch in plan.micro_batches)
    most = max(int(batch.tokens.max()) for batch in plan.micro_batches)
    if not np.array_equal(documents, np.flatnonzero(lengths)) or held != lengths.sum():
        raise RuntimeError(f"{plan.method}: the plan does not have every token once")
    if most > capacity:
        raise RuntimeError(f"{plan.method}: a rank has {most} tokens, over its {capacity}")


def imbalance(plan: balance.Plan) -> float:
    """Return max/mean over ranks of attention's work, in pairs, of the worst micro-batch."""
    worst = 1.0
    for batch in plan.micro_batches:
        cu = np.r_[0, np.cumsum(batch.lengths)]
        columns = (batch.cut.columns(cu, rank) for rank in range(plan.ranks))
        pairs = np.array([causal_pairs(starts, stops).sum() for _, starts, stops in columns])
        worst = max(worst, float(pairs.max() / pairs.mean()))
    return worst


def planning() -> list[dict[str, Any]]:
    """Return how long planning takes on one core, the median of `REPEATS`."""
    rows = []
    for nodes, documents in PLANNED:
        lengths = np.random.default_rng(0).lognormal(8, 1.5, documents).astype(int).clip(1, 131072)
        cluster = balance.Cluster.preset(f"{nodes}x8-{DEVICE}")
        capacity = int(SLACK * lengths.sum() / cluster.ranks)
        took = []
        for _ in range(REPEATS):
            begin = time.process_time()
            plan = balance.plan(lengths, cluster, balance.Model.preset(MODEL), capacity=capacity)
            took.append(time.process_time() - begin)
        seconds = float(np.median(took))
        row = {"ranks": cluster.ranks, "documents": documents, "seconds": seconds, "samples": took}
        rows.append(row | {"over_bound": plan.seconds / plan.bound})
    return rows


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Return the cells as a table: predicted seconds over the bound, and planning of "auto"."""
    methods = (*balance.METHODS, "auto")
    head = ["cell", "documents", *methods, "attention max/mean", "remapped", "planning"]
    rows = []
    for key, cell in cells.items():
        found = [cell["methods"].get(m) for m in methods]
        values = ["" if x is None else f"{x['over_bound']:.3f}" for x in found]
        auto = cell["methods"]["auto"]
        remapped = cell.get("remap", {}).values()
        end = [f"{auto['attention']:.3f}", " and ".join(f"{x:.3f}" for x in remapped)]
        end.append(f"{1e3 * auto['planning']:.0f} ms")
        rows.append([key, f"{cell['documents']:,}", *values, *end])
    return harness.table(head, rows)


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Draw each method's seconds over the bound, a line a method, cells by "auto"'s own."""
    cells = results["cells"]
    plt = harness.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for method in (*balance.METHODS, "auto"):
        values = sorted(
            cell["methods"][method]["over_bound"]
            for cell in cells.values()
            if method in cell["methods"]
        )
        left.plot(np.linspace(0, 1, len(values)), values, label=method, marker=".")
    left.set(yscale="log", xlabel="share of cells", ylabel="predicted seconds / bound")
    left.legend(frameon=False)
    work = [(c["documents"], c["methods"]["auto"]["planning"]) for c in cells.values()]
    right.loglog(*zip(*work, strict=True), ".", color="#222222")
    right.set(xlabel="documents", ylabel='seconds of planning, "auto", one core')
    figure.savefig(path, dpi=120)


def measure(options: Namespace) -> dict[str, Any]:
    cells = {}
    for case in itertools.product(options.distributions, options.contexts, options.ranks):
        name, context, ranks = case
        print(f"{name} {context} × {ranks}", file=sys.stderr)
        if (cell := cell_of(name, CONTEXTS[context], ranks)) is not None:
            cells[f"{name}, {context} × {ranks}"] = cell
    print(table(cells))
    planned = planning()
    for row in planned:
        print("{ranks} ranks × {documents} documents: {seconds:.4f} s".format(**row))
    for name, few in (("8 and 32 ranks", True), ("more ranks", False)):
        found = [x["methods"] for key, x in cells.items() if key.endswith(("× 8", "× 32")) == few]
        for method in balance.METHODS:
            measured = [x for x in found if method in x]
            ratios = [x[method]["seconds"] / x["auto"]["seconds"] for x in measured]
            if ratios:
                slower = sum(ratio < 1 for ratio in ratios)
                print(f"{name}: auto over {method}: mean {np.mean(ratios):.2f}×, {slower} below 1")
    return {"model": MODEL, "device": DEVICE, "cells": cells, "planning": planned}


ARGUMENTS = {
    "--ranks": [*RANKS],
    "--contexts": ([*CONTEXTS], None, [*CONTEXTS]),
    "--distributions": [*DISTRIBUTIONS],
}

if __name__ == "__main__":
    harness.run("balance", __doc__, ARGUMENTS, measure, draw_figure, canary_is="none")
