"""Measure the error of predicted times for work that was not profiled.

`Cluster.here` profiles a machine by a grid of calls. Here rounds interleave that profile with
held-out work: packed documents, hops of a ring, windows, other heads and head dims, linear
attention, and linear modules. The median of the measured times is compared with two predictions:
the fitted costs, and the rule of other planners that time is proportional to the pairs of the mask.
The rule's rate is the median over the profile.

On a CPU all times, including the canary's, are CPU times of the rank's core
(`seqpar/costs/profile/machine.py`): other processes change them little.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.kernels.softmax_workloads import pretrain_documents
from seqpar import Layout
from seqpar.costs.cluster import Cluster
from seqpar.costs.fit import describe, sample_tasks, seconds
from seqpar.costs.grid import Tasks, slice_tasks
from seqpar.costs.profile.calls import Calls, LinearCalls, Modules, Setting, SoftmaxCalls
from seqpar.costs.profile.harness import PASSES
from seqpar.costs.profile.machine import core_seconds, one_thread, profile
from seqpar.layout.masks.mask import Mask, Slices, slices_between

# (name, cu_seqlens, layout, ranks, own rank, keys' rank, window)
Work = tuple[str, list[int], str, int, int, int, int | None]


def slices_of(work: Work) -> Slices:
    """Return the slices of a rank's queries over a rank's keys."""
    _, cu, layout, ranks, own, other, window = work
    geometry = getattr(Layout, layout)(cu, ranks).geometry
    size = (-1 if window is None else window - 1, -1)
    mask = Mask.of(True, size, None, geometry)
    return slices_between(geometry, own, geometry, other, mask)


def softmax_work(scale: int) -> list[Work]:
    """Return held-out softmax attention; documents are `scale` times as long as on a CPU."""
    found: list[Work] = []
    for tokens in (100, 700, 1500, 3000, 6000):
        found.append(("document", [0, tokens], "contiguous", 1, 0, 0, None))
    for seed, (tokens, mean) in enumerate(((4000, 150), (4000, 400), (6000, 1000), (6000, 2500))):
        documents = pretrain_documents(tokens, mean, seed)
        found.append(("packed", documents, "contiguous", 1, 0, 0, None))
    for tokens, ranks, own, other in (
        (6000, 3, 1, 1),
        (6000, 3, 2, 0),
        (12000, 4, 1, 2),
        (20000, 8, 5, 2),
        (20000, 8, 2, 5),
        (5000, 8, 3, 6),
    ):
        found.append(("ring hop", [0, tokens], "zigzag", ranks, own, other, None))
    found.append(("ring hop, packed", pretrain_documents(12000, 1500, 5), "zigzag", 4, 1, 2, None))
    found.append(("end of a document", [0, 8000], "contiguous", 10, 9, 9, None))
    for tokens, window in ((3000, 100), (3000, 700), (6000, 1500), (5000, 3000)):
        found.append(("window", [0, tokens], "contiguous", 1, 0, 0, window))
    found.append(("window, packed", pretrain_documents(5000, 1500, 7), "contiguous", 1, 0, 0, 500))
    return [
        (work[0], [scale * x for x in work[1]], *work[2:6], work[6] and scale * work[6])
        for work in found
    ]


def held_out(setting: Setting) -> list[tuple[dict[str, Any], Calls]]:
    """Return the held-out calls of attention, each with its record."""
    scale = 8 if setting.device == "cuda" else 1
    found: list[tuple[dict[str, Any], Calls]] = []
    for i, work in enumerate(softmax_work(scale)):
        # Some calls have twice the heads, or half the heads with twice the head dim.
        heads, dim = ((1, 1), (2, 1), (0.5, 2))[i % 3] if i % 2 else (1, 1)
        used = replace(setting, heads=int(setting.heads * heads), head_dim=setting.head_dim * dim)
        if used.head_dim > 128:
            used = setting
        slices = slices_of(work)
        tasks = slice_tasks(slices)
        record = {
            "kind": work[0],
            "tokens": work[1][-1],
            "window": work[6],
            "heads": used.heads,
            "head_dim": used.head_dim,
            "tasks": [x.tolist() for x in (tasks.rows, tasks.keys, tasks.pairs, tasks.windowed)],
        }
        found.append((record, SoftmaxCalls(slices, used)))
    for tokens, heads in ((700, 4), (2500, 4), (6000, 2), (1500, 8)):
        record = {"kind": "linear", "tokens": scale * tokens, "heads": heads}
        found.append((record, LinearCalls(scale * tokens, replace(setting, heads=heads))))
    return found


def modules(setting: Setting) -> list[tuple[dict[str, Any], Calls]]:
    scale = 8 if setting.device == "cuda" else 1
    found: list[tuple[dict[str, Any], Calls]] = []
    for tokens, width in ((300, 512), (1000, 512), (700, 768), (2000, 384)):
        made = Modules(scale * tokens, scale * width, setting)
        found.append(({"kind": "modules", "tokens": scale * tokens, "flops": made.flops}, made))
    return found


def predictions(record: dict[str, Any], cluster: Cluster) -> list[float]:
    """Return the predicted seconds of held-out work, forward and backward."""
    device = cluster.device
    if record["kind"] == "modules":
        forward = record["flops"] / (device.matmul_rate * device.matmul_share)
        return [forward, 2 * forward]
    if record["kind"] == "linear":
        shape, dim = (record["tokens"], record["heads"]), device.recurrent.head_dim
        recurrent = device.recurrent
        return [
            recurrent.call[back] + float(recurrent.work(*shape, dim, dim, back))
            for back in (False, True)
        ]
    tasks = Tasks.of(*record["tasks"])
    shape = record["heads"], record["head_dim"]
    return [float(device.attention.together(tasks, *shape, back)[0]) for back in (False, True)]


def pairs_alone(found: dict[str, Any]) -> Callable[[dict[str, Any]], list[float]]:
    """Return the rule that time is proportional to pairs, at the profile's median rates."""
    samples = [sample for sample in found["samples"] if "keys" in sample]
    work = found["heads"] * found["head_dim"]
    each = [seconds(sample) / sample_tasks(sample).pairs.sum() / work for sample in samples]
    per_pair = np.median(each, axis=0)

    def predict(record: dict[str, Any]) -> list[float]:
        pairs = sum(record["tasks"][2]) * record["heads"] * record["head_dim"]
        return [float(pairs * x) for x in per_pair]

    return predict


def compare(found: dict[str, Any], cluster: Cluster) -> list[dict[str, Any]]:
    """Return a row for each piece of held-out work and pass: measured, predicted and errors."""
    rule, rows = pairs_alone(found), []
    for record in found["held_out"]:
        others = rule(record) if "tasks" in record else [None, None]
        for way, time, other in zip(PASSES, predictions(record, cluster), others, strict=True):
            measured = statistics.median(record[way])
            rows.append(
                {
                    "kind": record["kind"],
                    "tokens": record["tokens"],
                    "pass": way,
                    "measured": measured,
                    "predicted": time,
                    "error": time / measured - 1,
                    "error_of_pairs_alone": None if other is None else other / measured - 1,
                }
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and ninth decile of absolute errors, by kind of work and overall."""
    kinds = sorted({row["kind"] for row in rows})
    parts = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds} | {"all": rows}
    found: dict[str, Any] = {}
    for kind, part in parts.items():
        sizes = np.abs([row["error"] for row in part])
        others = [row["error_of_pairs_alone"] for row in part]
        peers = np.abs([x for x in others if x is not None])
        found[kind] = {
            "median": float(np.median(sizes)),
            "ninth_decile": float(np.quantile(sizes, 0.9)),
            "median_of_pairs_alone": float(np.median(peers)) if peers.size else None,
        }
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    rows = results["rows"]
    figure, axes = harness.pyplot().subplots(
        1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
    )
    kinds = sorted({row["kind"] for row in rows})
    for axis, way in zip(axes, PASSES, strict=True):
        axis.axhspan(0.9, 1.1, color="0.92")
        axis.axhline(1, color="0.6", linewidth=0.8)
        for i, kind in enumerate(kinds):
            part = [row for row in rows if (row["kind"], row["pass"]) == (kind, way)]
            times = [1e3 * row["measured"] for row in part]
            ratios = [row["predicted"] / row["measured"] for row in part]
            axis.scatter(times, ratios, s=28, color=f"C{i % 10}", marker="os^Dv"[i % 5], label=kind)
        axis.set(xscale="log", xlabel="measured, ms", title=way, ylim=(0.5, 1.5))
    axes[0].set_ylabel("predicted / measured")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


def canary(setting: Setting) -> float:
    """Return the CPU seconds that a fixed product takes now."""
    x = torch.randn(1024, 1024, device=setting.device)
    return statistics.median(core_seconds(lambda: x @ x, setting.device) for _ in range(50))


def measure(options: Namespace) -> dict[str, Any]:
    """Measure, predict, and print. The canary's times are CPU times too."""
    setting = Setting.of_this_machine()
    with one_thread():
        canary(setting)
        before = canary(setting)
        found = profile(options.rounds, [*held_out(setting), *modules(setting)])
        after = canary(setting)
    rows = compare(found, Cluster(**describe(found)))
    for row in rows:
        print(
            f"{row['kind']:18} {row['tokens']:6} {row['pass']:9} {row['measured'] * 1e3:9.2f} ms, "
            f"predicted {row['predicted'] * 1e3:9.2f}, {row['error']:+6.1%}"
        )
    errors = summary(rows)
    for kind, sizes in errors.items():
        other = sizes["median_of_pairs_alone"]
        rule = "" if other is None else f"; proportional to pairs: {other:.1%}"
        figures = f"median {sizes['median']:.1%}, 9 of 10 below {sizes['ninth_decile']:.1%}"
        print(f"{kind:18} {figures}{rule}")
    drift = harness.check_canary(before, after)
    return {"canary_drift": drift, "errors": errors, "rows": rows, "profile": found}


if __name__ == "__main__":
    arguments = {"--rounds": (9, "turns of each call")}
    harness.run("costs", __doc__, arguments, measure, plot, canary_is="none")
