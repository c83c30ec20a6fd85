"""Compare the times of steps with their simulations.

Attention of each strategy, forward and backward, on 1, 2 and 4 ranks of this machine's cores, and
on 2 and 4 ranks on a switch of emulated links, where computes sleep. Device and links are measured
first; no time of a step enters its simulation. The same code is run and recorded. Four ranks on two
cores share them by the operating system's schedule, and equally in the simulation.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.network.emulated import Network, lacking
from benchmarks.simulate.ranks import Cell, code, error, exchanges, seconds
from seqpar import simulate
from seqpar.auto.described_cluster import operator_seconds
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Device, Link
from seqpar.costs.fit import describe
from seqpar.costs.profile import machine
from seqpar.simulate import error_model
from seqpar.simulate.playback.op_costs import price
from seqpar.simulate.recording.program import Compute, Operators

Row = dict[str, Any]
STRATEGIES = ("ring", "all_gather", "ulysses", "token_ring")
LAYOUTS = ("zigzag", "contiguous")
SIZES = {"cores": [2**i for i in range(16, 24)], "links": [2**i for i in range(19, 24)]}
RATE = 400  # Mbit/s of an emulated link
TOLERANCE = 1e-4  # of results in fp32, relative
COMPUTES = (0.5, 1.5)  # of a step on links, over the time of a hop of Ring


def by_place(rows: list[Row]) -> dict[str, float]:
    """Return the RMS error by place of steps that were measured and simulated."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["where"], []).append(row["error"])
    return {place: float(np.sqrt(np.mean(np.square(x)))) for place, x in errors.items()}


def cells(tokens: int) -> list[Cell]:
    """Return the cells: first on cores, then on links."""
    found = []
    for n in (tokens, 2 * tokens):
        found.append(Cell("cores", 1, "ring", "zigzag", (n,), 4))
        found.append(Cell("cores", 1, "ring", "zigzag", (n // 2, n // 4, n // 8, n // 8), 4))
    for ranks in (2, 4):
        n = tokens * ranks
        for strategy in STRATEGIES:
            found.append(Cell("cores", ranks, strategy, "zigzag", (n,), 4))
            found.append(Cell("cores", ranks, strategy, "zigzag", (n // 2, n // 4, n // 4), 4))
        found.append(Cell("cores", ranks, "ring", "contiguous", (n,), 4))
    hop = tokens * 8 * 2 * 64 * 4 * 8 / (RATE * 1e6)  # seconds to send 8 heads of keys and values
    for ranks in (2, 4):
        for strategy in STRATEGIES:
            for ratio in COMPUTES:
                pair = ratio * hop / (tokens**2 * 8 / 2)
                found.append(Cell("links", ranks, strategy, "zigzag", (tokens * ranks,), 8, pair))
    return found


def fit(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Return the seconds per message, and per byte."""
    x, y = np.array(sizes, float), np.array(times)
    each, once = np.polyfit(x, y, 1, w=1 / y)
    return max(0.0, float(once)), float(each)


def asleep(pair_seconds: float, device: Device) -> Any:
    """Return the costs of computes: sleeps per pair and head, or the device's costs."""

    def priced(found: list[Compute]) -> dict[int, float]:
        if not pair_seconds:
            return price(device, found)
        others = price(device, [x for x in found if isinstance(x.work, Operators)])
        return others | {id(x): x.area * pair_seconds for x in found if id(x) not in others}

    return priced


def joined(network: Network, where: str, ranks: int, rounds: int) -> Link:
    """Return the measured link between ranks."""
    sizes = SIZES[where]
    if where == "cores":  # each end of a message takes a core
        once, each = fit(sizes, mean(network(exchanges, sizes, rounds, 1, True)))
        return Link(once / 2, 2 / each)
    alone, together = (mean(network(exchanges, sizes, rounds, n)) for n in (1, ranks - 1))
    once, each = fit(sizes, alone)
    return Link(once, 1 / each, min(1.0, float(np.median(np.divide(alone, together)))))


def mean(ranks: list[list[float]]) -> list[float]:
    return [statistics.mean(x) for x in zip(*ranks, strict=True)]


def linked(cluster: Cluster, where: str, ranks: int, link: Link) -> Cluster:
    """Return a cluster with that link between ranks."""
    if where == "links":
        device, host = cluster.device, cluster.host
        return Cluster("links", ranks, 1, 1, device, link, link, host, overlaps=True)
    return replace(cluster, inside=link)


def simulated(cell: Cell, cluster: Cluster) -> float:
    programs = simulate.record(code(cell), cell.ranks, ordered=False)
    return simulate.play(
        programs, cluster, pricing=asleep(cell.pair_seconds, cluster.device)
    ).seconds


def measured(network: Network, cell: Cell, rounds: int) -> Row:
    """Return the seconds of a cell's steps, each on its slowest rank."""
    answers = network(seconds, cell, rounds)
    times = [max(each) for each in zip(*answers, strict=True)]
    middle = statistics.median(times)
    lower, upper = harness.quartiles(times)
    return {"samples": times, "measured": middle, "spread": (upper - lower) / 2 / middle}


def profiled(cores: int, rounds: int) -> Cluster:
    """Return this machine, measured while `cores` cores compute, because they share its memory."""
    with Network("loopback", cores, timeout=600) as network:
        found = network(machine.profile, rounds)[0]
        found["rates"]["operators"] = [1 / x for x in network(operator_seconds)]
    return Cluster(**describe(found))


def on_ranks(
    where: str, ranks: int, part: list[Cell], cluster: Cluster, options: Namespace
) -> list[Row]:
    """Return a row for each cell of these ranks, with the links measured there."""
    kind, rate = ("switch", RATE) if where == "links" else ("loopback", 0)
    rows = []
    with Network(kind, ranks, rate, timeout=300) as network:
        if ranks > 1:
            link = joined(network, where, ranks, options.rounds)
            cluster = linked(cluster, where, ranks, link)
            print(f"{where} {ranks}: {link}", flush=True)
        for strategy in dict.fromkeys(cell.strategy for cell in part):
            cell = next(cell for cell in part if cell.strategy == strategy)
            small = cell._replace(lengths=(150, 90), pair_seconds=0.0)
            harness.check_error(strategy, max(network(error, small)), TOLERANCE)
        for cell in part:
            row = cell._asdict() | measured(network, cell, options.rounds)
            row["simulated"] = simulated(cell, cluster)
            row["error"] = row["simulated"] / row["measured"] - 1
            rows.append(row)
            print(
                f"{where} {ranks} {cell.strategy:10} {len(cell.lengths)} documents: "
                f"{row['measured'] * 1e3:8.1f} ms ± {row['spread']:5.1%}, "
                f"simulated {row['simulated'] * 1e3:8.1f}, {row['error']:+6.1%}",
                flush=True,
            )
    return rows


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return the median and the worst error, and the median spread, by place and ranks."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(f"{row['where']}, {row['ranks']}", []).append(row)
    return {
        name: {
            "median": float(np.median([abs(x["error"]) for x in part])),
            "worst": max(abs(x["error"]) for x in part),
            "spread": float(np.median([x["spread"] for x in part])),
        }
        for name, part in (parts | {"all": rows}).items()
    }


def publish(results: Row, path: Path) -> None:
    """Draw simulated over measured seconds, and write the error bars of predictions.

    The picture has the quartiles of measured seconds.
    """
    rows = results["rows"]
    figure, axis = harness.pyplot().subplots(figsize=(9, 4.5), layout="constrained")
    axis.axhspan(0.95, 1.05, color="0.92")
    axis.axhline(1, color="0.6", linewidth=0.8)
    names = sorted({(row["where"], row["ranks"]) for row in rows})
    for i, name in enumerate(names):
        part = [row for row in rows if (row["where"], row["ranks"]) == name]
        times = [1e3 * row["measured"] for row in part]
        ratios = [row["simulated"] / row["measured"] for row in part]
        bars = [row["spread"] * ratio for row, ratio in zip(part, ratios, strict=True)]
        label = f"{name[1]} ranks, {name[0]}"
        axis.errorbar(times, ratios, bars, fmt="os^Dv"[i % 5], color=f"C{i}", ms=5, label=label)
    axis.set(xscale="log", xlabel="measured, ms", ylabel="simulated / measured")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    if {row["where"] for row in rows} == {"cores", "links"}:  # the error bars need both
        file = Path(error_model.__file__).with_name(error_model.FILE)
        file.write_text(json.dumps(by_place(rows), indent=1) + "\n")


def measure(options: Namespace) -> Row:
    if "links" in options.places and (missing := lacking()):
        raise SystemExit(f"links need {missing}: try --places cores")
    chosen = [cell for cell in cells(options.tokens) if cell.where in options.places]
    rows, clusters = [], {}
    for where, ranks in dict.fromkeys((cell.where, cell.ranks) for cell in chosen):
        part = [cell for cell in chosen if (cell.where, cell.ranks) == (where, ranks)]
        cores = min(ranks, machine.devices())
        cluster = clusters.get(cores) or profiled(cores, options.rounds)
        clusters[cores] = cluster
        rows += on_ranks(where, ranks, part, cluster, options)
    errors = summary(rows)
    for name, x in errors.items():
        figures = f"median {x['median']:.1%}, worst {x['worst']:.1%}, spread {x['spread']:.1%}"
        print(f"{name:10} {figures}")
    profiles = {cores: x.measured for cores, x in clusters.items()}
    return {"rate_mbit": RATE, "errors": errors, "rows": rows, "profiles": profiles}


ARGUMENTS = {
    "--tokens": (2048, "a rank"),
    "--rounds": 7,
    "--places": ["cores", "links"],
}

if __name__ == "__main__":
    harness.run("simulate", __doc__, ARGUMENTS, measure, publish)
