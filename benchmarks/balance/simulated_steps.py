"""Predict training steps with attention moved to idle units, and with WLB-LLM's packing.

A unit is 8 H200 with tensor parallelism: a server has the time of 8 GPUs and their 8 NICs. Each
unit has the tokens of the context, in documents packed in order and cut at the units' ends; WLB-LLM
packs the same documents. Steps are forward and backward of all layers, predicted by `seqpar.costs`.
Messages of tensor parallelism are not hidden. The reduction of gradients, the optimizer and
recomputation are not counted.

* WLB-LLM: see `wlb_steps`. Its context parallel groups have the best size.
* DistCA's rule and ours: every unit keeps its tokens, attention moves to idle units, and a server's
  own work hides the messages (ping-pong). A tick of a pipeline takes as long as its slowest unit;
  the attention of all its stages is planned together, for all units.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.documents import draw
from benchmarks.balance.published_rule import published
from benchmarks.balance.task_figures import as_parts, travelling
from benchmarks.balance.units import TENSOR, WAYS, Machine
from benchmarks.balance.wlb_steps import wlb
from benchmarks.harness import table
from seqpar.balance import Tasks, disaggregate, place_homes
from seqpar.core.arguments import Ints
from seqpar.core.ranges import sort_keys
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.layout.tasks.tasks import TaskRectangles

CAUSAL = Mask(UNLIMITED, 0)
TOLERANCE = 0.002  # of our planner: small, since messages are hidden and balance costs no time
# DistCA's tables: its speed over WLB-LLM's, by model, pipeline and distribution, from … to.
PUBLISHED = {
    ("8B", False, "pretrain"): "1.07–1.20",
    ("8B", False, "prolong"): "1.05–1.12",
    ("8B", True, "pretrain"): "1.15–1.30",
    ("8B", True, "prolong"): "1.10–1.35",
    ("34B", False, "pretrain"): "to 1.15",
    ("34B", False, "prolong"): "to 1.15",
    ("34B", True, "pretrain"): "to 1.25",
    ("34B", True, "prolong"): "to 1.25",
}


def calls_of(tasks: TaskRectangles) -> Tasks:
    """Return tasks as calls for the prediction of their time."""
    rows, keys = tasks.q_stops - tasks.q_starts, tasks.k_stops - tasks.k_starts
    return Tasks.of(rows, keys, as_parts(tasks).areas())


def tick(machine: Machine, layout: Layout, tasks: TaskRectangles) -> float:
    """Return seconds of one layer, forward and backward, of all units together.

    A server waits for its messages if its own work takes less time.
    """
    queries, keys = travelling(tasks, layout)
    arriving = machine.travel(queries * machine.row_bytes.query + keys * machine.row_bytes.key)
    tokens, total = np.array(layout.tokens_per_rank, np.float64), 0.0
    home, calls = home_of(tasks, layout), calls_of(tasks)
    own_calls = calls_of(tasks.take(home))
    for way in WAYS:
        every = machine.attention(calls, tasks.servers, layout.ranks, way)
        own = machine.attention(own_calls, tasks.servers[home], layout.ranks, way)
        total += machine.linear(tokens, way).max()
        total += float((np.maximum(own, arriving) + every - own).max())
    return total


def home_of(tasks: TaskRectangles, layout: Layout) -> NDArray[np.bool_]:
    """Return whether the owner of its queries computes each task."""
    ranks, documents, starts, _ = layout.geometry.all_spans()
    keys = sort_keys(documents, starts)
    order = np.argsort(keys)
    wanted = sort_keys(tasks.documents, tasks.q_starts)
    span = np.searchsorted(keys[order], wanted, side="right") - 1
    found: NDArray[np.bool_] = ranks[order][span] == tasks.servers
    return found


Planner = Callable[[Layout, Machine], TaskRectangles]
PLANNERS: dict[str, Planner] = {
    "ours": lambda layout, machine: disaggregate(
        layout, CAUSAL, machine.costs, row_bytes=machine.row_bytes, tolerance=TOLERANCE
    ),
    "DistCA's rule": lambda layout, machine: published(layout, machine.row_bytes).tasks,
}


def packed(lengths: Ints, bins: int, tokens: int) -> list[Ints]:
    """Return each bin's lengths: documents packed in order, and cut at the ends of bins."""
    edges = np.unique(np.r_[0, np.cumsum(lengths), np.arange(bins + 1) * tokens])
    place = np.searchsorted(edges, np.arange(bins + 1) * tokens)
    return [np.diff(edges[a : b + 1]) for a, b in itertools.pairwise(place)]


def layout_of(bins: dict[int, Ints], units: int) -> Layout:
    """Return the layout of units that hold whole documents; idle units hold none."""
    owner = np.concatenate([np.full(lengths.size, unit) for unit, lengths in bins.items()])
    lengths = np.concatenate([*bins.values()])
    cut = Spans.of(units, owner, np.arange(lengths.size), 0 * lengths, lengths)
    return Layout(np.r_[0, np.cumsum(lengths)], cut)


def moving(machine: Machine, bins: list[Ints], units: int, stages: int, planner: Planner) -> float:
    """Return the seconds of a step that moves attention to idle units.

    In tick t stage s computes micro-batch t − s; forwards come first, and backwards the same way.
    """
    replicas, total = units // stages, 0.0
    batches = len(bins) // replicas
    for time in range(batches + stages - 1):
        active = {
            stage * replicas + replica: bins[(time - stage) * replicas + replica]
            for stage in range(stages)
            if 0 <= time - stage < batches
            for replica in range(replicas)
        }
        layout = layout_of(active, units)
        total += tick(machine, layout, planner(layout, machine))
    return total * machine.layers / stages


def chosen(machine: Machine, lengths: Ints, units: int) -> float:
    """Return the seconds of a step without a pipeline, with chosen homes of documents."""
    layout = place_homes(lengths, units, row_bytes=machine.row_bytes)
    return tick(machine, layout, PLANNERS["ours"](layout, machine)) * machine.layers


def cell(name: str, model: str, context: int, gpus: int, stages: int, seeds: int) -> dict[str, Any]:
    """Return one cell: each method's seconds per step, means over seeds, and their ratios."""
    machine, units = Machine.of(model), gpus // TENSOR
    batches = 1 if stages == 1 else 2 * stages
    rows = []
    for seed in range(seeds):
        bins = units // stages * batches
        contents = packed(draw(name, bins * context, context, seed), bins, context)
        lengths = np.concatenate(contents)
        seconds, idle = wlb(machine, lengths, units, stages, batches)
        row = {"WLB-LLM": seconds, "idle": idle}
        for planner in PLANNERS:
            row[planner] = moving(machine, contents, units, stages, PLANNERS[planner])
        if stages == 1:
            row["ours, homes chosen"] = chosen(machine, lengths, units)
        rows.append(row)
    means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    ours = means["ours"]
    ratios = {f"over {key}": means[key] / ours for key in ("WLB-LLM", "DistCA's rule")}
    return means | ratios | {"rule over WLB-LLM": means["WLB-LLM"] / means["DistCA's rule"]}


def tables(seeds: int = 3) -> dict[str, Any]:
    """Return all cells, by model, distribution, stages, context and GPUs."""
    found = {}
    for model, name, stages in itertools.product(("8B", "34B"), ("pretrain", "prolong"), (1, 4)):
        for context, gpus in itertools.product((2**17, 2**18, 2**19), (64, 128, 256, 512)):
            key = f"{model}, {name}, {stages}, {context // 1024}K, {gpus}"
            found[key] = cell(name, model, context, gpus, stages, seeds)
    return found


def summary(cells: dict[str, Any]) -> str:
    """Return the range over contexts and GPUs of each model, distribution and pipeline."""
    columns = "over WLB-LLM", "rule over WLB-LLM", "over DistCA's rule"
    head = ["model", "lengths", "stages", *columns, "published"]
    lines = []
    for (model, pipeline, name), published_range in PUBLISHED.items():
        stages = 4 if pipeline else 1
        rows = [x for key, x in cells.items() if key.startswith(f"{model}, {name}, {stages},")]
        ranges = [[row[column] for row in rows] for column in columns]
        values = [f"{min(x):.2f}–{max(x):.2f}" for x in ranges]
        lines.append([model, name, str(stages), *values, published_range])
    return table(head, lines)
