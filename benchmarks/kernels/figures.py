"""Show the results of `run.py`: a table and a figure."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness

Result = dict[str, Any]
FACTORS = {"forward": 1.0, "backward": 2.5}  # FLOPs, in forwards


def seconds(run: dict[str, Any], direction: str) -> float:
    """Return the median of a contender's rounds, or NaN without rounds."""
    times = run.get(direction)
    return statistics.median(times) if times else math.nan


def table(results: list[Result]) -> None:
    """Print TFLOP/s by mask area, our ratio to each peer, and each share of the limit."""
    names = ("workload", "contender", "forward", "backward", "ours ÷ it", "backward", "of limit")
    shown = Table(*names)
    for result in results:
        ours = next(run for run in result["runs"] if run["contender"] in ("triton", "aten"))
        for run in result["runs"]:
            row = result["workload"], run["contender"]
            if "refused" in run:
                shown.add_row(*row, "refused", "", "", "", run["refused"][:40])
                continue
            took = {direction: seconds(run, direction) for direction in FACTORS}
            rates = [FACTORS[x] * result["flops"] / took[x] / 1e12 for x in FACTORS]
            ratios = [took[x] / seconds(ours, x) for x in FACTORS]
            cells = (*rates, *ratios, result["limit"] / took["forward"])
            shown.add_row(*row, *("" if math.isnan(x) else f"{x:.3g}" for x in cells))
    Console(width=120).print(shown)


def plot(results: list[Result], path: Path) -> None:
    """Draw each contender's TFLOP/s on each workload, forward above backward."""
    runs = [{run["contender"]: run for run in result["runs"]} for result in results]
    done = (name for found in runs for name in found if "refused" not in found[name])
    names, places = sorted(set(done)), range(len(results))
    size = (max(8, 0.6 * len(results)), 8)
    figure, axes = harness.pyplot().subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for axis, (direction, factor) in zip(axes, FACTORS.items(), strict=True):
        for i, name in enumerate(names):
            rates = [
                factor * result["flops"] / seconds(found.get(name, {}), direction) / 1e12
                for result, found in zip(results, runs, strict=True)
            ]
            heights = [0.0 if math.isnan(rate) else rate for rate in rates]
            axis.bar([j + width * i for j in places], heights, width, label=name)
        axis.set_ylabel(f"{direction}, TFLOP/s by mask area")
    labels = [result["workload"] for result in results]
    axes[1].set_xticks([j + 0.4 for j in places], labels, rotation=60, ha="right")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(names))
    figure.savefig(path, dpi=120)
