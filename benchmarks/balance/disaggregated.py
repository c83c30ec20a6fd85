"""Measure the bytes that give all ranks equal attention, and the time of planning.

Lengths are Pretrain's or ProLong's, packed in order; each rank has the tokens of the context. "cut"
splits a document where a rank's tokens end into separate documents, as in the published simulation.
"whole" keeps documents whole, so queries after such an end also need keys of other ranks. Each plan
is checked first: it must have every visible pair once.
"""

from __future__ import annotations

import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.balance.documents import draw
from benchmarks.balance.published_rule import published
from benchmarks.balance.simulated_steps import summary, tables
from benchmarks.balance.task_figures import bound, loads, received
from seqpar.balance import Cluster, Costs, Model, RowBytes, disaggregate, place_homes
from seqpar.costs.grid import causal_pairs
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.layout.tasks.tasks import TaskRectangles

CAUSAL = Mask(UNLIMITED, 0)
# Llama 8B in bf16, without lse, as in the published rule.
ROWS = RowBytes(4 * 32 * 128, 4 * 8 * 128)
COSTS = Costs(Cluster.preset("4x8-h200"), Model.preset("llama-8b"))
# Bytes per token that a layer keeps, including the rows of attention.
LAYER_BYTES = float(COSTS.activation_bytes(1)) / len(COSTS.model.layers)
TOLERANCES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
MIB = 2**20
MANY = 512, 4096  # servers and documents in the largest plan


def packed(name: str, ranks: int, context: int, seed: int, cut: bool) -> Layout:
    """Return documents packed in order, with `context` tokens per rank."""
    edges = np.r_[0, np.cumsum(draw(name, ranks * context, context, seed))]
    if cut:
        edges = np.unique(np.r_[edges, np.arange(ranks + 1) * context])
    return Layout.contiguous(edges, ranks)


def figures(layout: Layout, tasks: TaskRectangles) -> dict[str, float]:
    """Return the balance of tasks, the MiB that ranks receive, and the balance of memory."""
    load, travels = loads(tasks, layout.ranks), received(tasks, layout, ROWS)
    lengths = layout.geometry.lengths
    if load.sum() != causal_pairs(np.zeros_like(lengths), lengths).sum():
        raise RuntimeError("tasks must have every pair once")
    rows = np.array(layout.tokens_per_rank) * sum(ROWS)
    peak, layer = rows + travels, np.array(layout.tokens_per_rank) * LAYER_BYTES + travels
    return {
        "max_over_mean": float(load.max() / load.mean()),
        "mib": float(travels.mean() / MIB),
        "mib_most": float(travels.max() / MIB),
        "peak_bytes_max_over_mean": float(peak.max() / peak.mean()),
        "layer_bytes_max_over_mean": float(layer.max() / layer.mean()),
        "tokens_max_over_mean": float(rows.max() / rows.mean()),
    }


def at_home(layout: Layout) -> TaskRectangles:
    """Return the tasks if every rank computes its own queries."""
    return disaggregate(layout, CAUSAL, row_bytes=ROWS, tolerance=float(layout.ranks))


METHODS: dict[str, Callable[[Layout, float], TaskRectangles]] = {
    "ours": lambda layout, tolerance: disaggregate(
        layout, CAUSAL, row_bytes=ROWS, tolerance=tolerance
    ),
    "published": lambda layout, tolerance: published(layout, ROWS, tolerance).tasks,
    "by surplus": lambda layout, tolerance: published(layout, ROWS, tolerance, True).tasks,
}


def mean_of(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure, and the largest max/mean."""
    means = {name: float(np.mean([x[name] for x in found])) for name in found[0]}
    return means | {"worst": max(x["max_over_mean"] for x in found)}


def curve(ranks: int, context: int, seeds: int, cut: bool) -> dict[str, Any]:
    """Return the figures of all methods at each tolerance, Pretrain, means over seeds."""
    layouts = [packed("pretrain", ranks, context, seed, cut) for seed in range(seeds)]
    homes = [at_home(layout) for layout in layouts]
    result: dict[str, Any] = {
        "home": mean_of([figures(*x) for x in zip(layouts, homes, strict=True)]),
        "bound": {},
    }
    for tolerance in TOLERANCES:
        least = [bound(loads(tasks, ranks), tolerance, ROWS) / ranks / MIB for tasks in homes]
        result["bound"][tolerance] = float(np.mean(least))
        for name, method in METHODS.items():
            found = [figures(layout, method(layout, tolerance)) for layout in layouts]
            result.setdefault(name, {})[tolerance] = mean_of(found)
        charged = [published(layout, ROWS, tolerance).charged / ranks / MIB for layout in layouts]
        result["published"][tolerance]["charged"] = float(np.mean(charged))
    return result


def chosen_homes(ranks: int, context: int, seeds: int) -> dict[str, float]:
    """Return the figures of layouts by `place_homes`, and the seconds that it takes."""
    found = []
    for seed in range(seeds):
        lengths = draw("pretrain", ranks * context, context, seed)
        begin = time.process_time()
        layout = place_homes(lengths, ranks, row_bytes=ROWS)
        took = time.process_time() - begin
        tasks = disaggregate(layout, CAUSAL, row_bytes=ROWS)
        found.append(figures(layout, tasks) | {"seconds": took})
    return mean_of(found)


def planning(repeats: int = 5) -> dict[str, Any]:
    """Return the median seconds of planning for many servers and documents, on one core."""
    servers, documents = MANY
    result = {}
    for name in ("pretrain", "prolong", "byted", "github", "magi"):
        lengths = draw(name, servers * 2**19, 2**19)[:documents]
        edges, took = np.r_[0, np.cumsum(lengths)], []
        for _ in range(repeats):
            layout = Layout.contiguous(edges, servers)  # new, without tables of an earlier plan
            begin = time.process_time()
            tasks = disaggregate(layout, CAUSAL, row_bytes=ROWS)
            took.append(time.process_time() - begin)
        result[name] = {
            "documents": lengths.size,
            "seconds": float(np.median(took)),
            "tasks": tasks.documents.size,
            "home": figures(layout, at_home(layout))["max_over_mean"],
            **figures(layout, tasks),
        }
    return result


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Draw the bytes against max/mean of each method, at 512K × 32, and of chosen homes."""
    cells, homes = results["curve"], results["homes"]
    plt = harness.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axis, packing in zip(axes, ("cut", "whole"), strict=True):
        cell = cells[f"512K × 32, {packing}"]
        for name in METHODS:
            points = cell[name].values()
            axis.plot([x["worst"] for x in points], [x["mib"] for x in points], "o-", label=name)
        axis.plot([1 + x for x in TOLERANCES], [*cell["bound"].values()], "k--", label="bound")
        axis.set(xlabel="max/mean of attention, the worst seed", title=f"documents {packing}")
        axis.plot(homes["worst"], homes["mib"], "r*", label="ours, homes chosen")
    axes[0].set(ylabel="MiB per rank and layer")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def table(cells: dict[str, Any]) -> str:
    """Return the table of MiB per rank and max/mean, at tolerance 0.05 (published rule: 0.1)."""
    head = [
        "context × ranks, documents",
        "not moved",
        "lower bound",
        "ours",
        "published rule",
        "by surplus",
    ]
    rows = []
    for name, cell in cells.items():
        home, least = cell["home"], by_tolerance(cell["bound"], 0.05)
        chosen = (
            by_tolerance(cell["ours"], 0.05),
            by_tolerance(cell["published"], 0.1),
            by_tolerance(cell["by surplus"], 0.05),
        )
        row = [f"{x['mib']:,.0f} ({x['max_over_mean']:.2f})" for x in (home, *chosen)]
        rows.append([name, row[0], f"{least:,.0f}", *row[1:]])
    return harness.table(head, rows)


def by_tolerance(values: dict[Any, Any], tolerance: float) -> Any:
    """Return the values for a tolerance; JSON keys are text."""
    return values.get(tolerance, values.get(str(tolerance)))


def measure(options: Namespace) -> dict[str, Any]:
    curves = {}
    cells = itertools.product(((2**19, 32), (2**19, 8), (2**17, 32)), ("cut", "whole"))
    for (context, ranks), packing in cells:
        print(f"{context} × {ranks}, {packing}", file=sys.stderr)
        found = curve(ranks, context, options.seeds, packing == "cut")
        curves[f"{context // 1024}K × {ranks}, {packing}"] = found
    print(table(curves))
    homes = chosen_homes(32, 2**19, options.seeds)
    print("homes chosen:", {k: round(v, 3) for k, v in homes.items()})
    plans = planning()
    for name, row in plans.items():
        print(f"planning {name}: {1e3 * row['seconds']:.1f} ms, {row['max_over_mean']:.3f}")
    steps = tables()
    print(summary(steps))
    return {"curve": curves, "homes": homes, "planning": plans, "tables": steps}


if __name__ == "__main__":
    arguments = {"--seeds": 12}
    harness.run("disaggregated-plans", __doc__, arguments, measure, draw_figure, canary_is="none")
