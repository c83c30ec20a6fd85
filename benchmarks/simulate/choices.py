"""Compare the strategy that simulation chooses with the fastest strategy.

In 100 random settings every strategy is measured and simulated: on 2 and 4 ranks of this machine's
cores, and on emulated links, where computes sleep. Device and links are measured first; no time of
a step enters a simulation. Two choices are compared with the fastest by their measured times: the
choice by prediction, and the choice of `make_attention("auto", ...)`, which measures strategies
with close predictions. Its measurements are separate from those of the comparison. Measured
settings are kept: the next start continues after them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS, harness
from benchmarks.kernels.device import START_AGAIN
from benchmarks.network.emulated import Network, lacking
from benchmarks.simulate.settings import Setting, drawn, errors, seconds, tuned
from benchmarks.simulate.validation import TOLERANCE, asleep, joined, linked, profiled
from seqpar.auto.choosing import Choice, choose
from seqpar.bench.results.results_file import SAME, check_same
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Link
from seqpar.costs.fit import describe
from seqpar.costs.profile import machine
from seqpar.simulate.candidates import Candidate, candidates
from seqpar.simulate.error_model import error_of

Row = dict[str, Any]
NEAR = 0.05  # additional time of a good choice, over the fastest


def measured(
    network: Network, setting: Setting, found: list[Candidate], rounds: int
) -> dict[str, list[float]]:
    """Return each candidate's seconds on the slowest rank. Exits if a result is wrong."""
    small = tuple(min(x, 60) for x in setting.lengths)
    answers = network(errors, setting._replace(lengths=small, pair_seconds=0.0), found)
    for candidate, wrong in zip(found, zip(*answers, strict=True), strict=True):
        harness.check_error(candidate, max(wrong), TOLERANCE)
    ranks = network(seconds, setting, found, rounds)
    times = [list(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
    return {str(candidate): each for candidate, each in zip(found, times, strict=True)}


def predicted(setting: Setting, cluster: Cluster, link: Link) -> Choice:
    """Return the choice by prediction, on a cluster with that link between ranks."""
    where = "links" if setting.rate_mbit else "cores"
    found = candidates(cluster, setting.ranks)
    cluster = linked(cluster, where, setting.ranks, link)
    pricing = asleep(setting.pair_seconds, cluster.device)
    options: dict[str, Any] = setting.call | {"pricing": pricing, "ordered": False}
    return choose(cluster, found, setting.shape, setting.made(), **options)


def judged(row: Row, cluster: Cluster) -> Row:
    """Return a setting's measured medians, simulated seconds, and the cost of the choices."""
    setting = Setting(**row["setting"] | {"lengths": tuple(row["setting"]["lengths"])})
    choice = predicted(setting, cluster, Link(**row["link"]))
    simulated = {str(x.candidate): x.seconds for x in choice.ranked}
    medians = {name: statistics.median(x) for name, x in row["samples"].items()}
    best = min(medians, key=lambda name: medians[name])
    chosen, auto = str(choice.candidate), row["auto"]["chosen"]
    lower, upper = harness.quartiles(row["samples"][best])
    return {
        "ranks": setting.ranks,
        "measured": medians,
        "simulated": simulated,
        "chosen": chosen,
        "auto": auto,
        "best": best,
        "loss": medians[chosen] / medians[best] - 1,
        "auto_loss": medians[auto] / medians[best] - 1,
        "spread": (upper - lower) / 2 / medians[best],
    }


def fraction(results: list[Row], strategy: str) -> tuple[float, int]:
    """Return the share of settings in which a strategy is near the fastest.

    The second number counts the settings in which the strategy was measured.
    """
    near = [
        x["measured"][strategy] <= (1 + NEAR) * x["measured"][x["best"]]
        for x in results
        if strategy in x["measured"]
    ]
    return sum(near) / len(near), len(near)


def same_code(results: list[Row]) -> tuple[float, int]:
    """Return the share of settings in which two strategies with the same code are close.

    Ring and AllGather on two ranks are such strategies. Noise keeps measured choices from being
    right more often than that. The second number counts the settings.
    """
    measured = [x["measured"] for x in results if x["ranks"] == 2]
    pairs = [sorted((x["ring"], x["all_gather"])) for x in measured]
    near = [slower <= (1 + NEAR) * faster for faster, slower in pairs]
    return sum(near) / max(1, len(near)), len(near)


def costs(losses: list[float]) -> Row:
    """Return the shares of choices that are near the fastest or the fastest, and their cost."""
    return {
        "near": sum(x <= NEAR for x in losses) / len(losses),
        "fastest": sum(x == 0 for x in losses) / len(losses),
        "mean": statistics.mean(losses),
        "worst": max(losses),
    }


def summary(results: list[Row]) -> Row:
    """Return the quality of the choices, and the error of simulated seconds."""
    errors = [
        x["simulated"][name] / seconds - 1
        for x in results
        for name, seconds in x["measured"].items()
    ]
    fixed = sorted({name for x in results for name in x["measured"]})
    return {
        "settings": len(results),
        "auto": costs([x["auto_loss"] for x in results]),
        "predicted": costs([x["loss"] for x in results]),
        "always": {name: fraction(results, name) for name in fixed},
        "same_code": same_code(results),
        "error": float(np.median(np.abs(errors))),
        "spread": statistics.median(x["spread"] for x in results),
    }


def table(found: Row) -> str:
    rows = [("settings", f"{found['settings']}")]
    for name, key in (("auto", "auto"), ("prediction alone", "predicted")):
        x = found[key]
        rows += [
            (f"{name}: within {NEAR:.0%} of the fastest", f"{x['near']:.0%}"),
            (f"{name}: the fastest", f"{x['fastest']:.0%}"),
            (f"{name}: what it costs, on average", f"{x['mean']:.1%}"),
            (f"{name}: what it costs at most", f"{x['worst']:.1%}"),
        ]
    rows += [
        *(
            (f"always {name}: within {NEAR:.0%}", f"{share:.0%} of {settings}")
            for name, (share, settings) in found["always"].items()
        ),
        (
            f"Ring and AllGather on 2 ranks, the same code: within {NEAR:.0%} of each other",
            "{:.0%} of {}".format(*found["same_code"]),
        ),
        ("error of simulated seconds, median", f"{found['error']:.1%}"),
        ("spread of the fastest's measured seconds, median", f"{found['spread']:.1%}"),
    ]
    return harness.table(["", ""], rows)


def plot(results: list[Row], path: Path) -> None:
    """Draw the sorted additional times of the choice and of each strategy over the fastest."""
    figure, axis = harness.pyplot().subplots(figsize=(9, 4.5), layout="constrained")
    names = sorted({name for x in results for name in x["measured"]})
    shown = {"auto": [x["auto_loss"] for x in results]}
    shown["prediction alone"] = [x["loss"] for x in results]
    for name in names:
        of = [x for x in results if name in x["measured"]]
        shown[f"always {name}"] = [x["measured"][name] / x["measured"][x["best"]] - 1 for x in of]
    for name, losses in shown.items():
        style = {} if name.startswith("always") else {"color": "k", "linewidth": 2}
        style |= {"linestyle": "--"} if name == "prediction alone" else {}
        share = np.arange(1, len(losses) + 1) / len(losses)
        axis.plot(100 * np.sort(losses) + 0.1, 100 * share, label=name, **style)
    axis.axvline(100 * NEAR, color="0.6", linewidth=0.8)
    axis.set(xscale="log", xlabel="longer than the fastest, %", ylabel="settings, %")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def groups(left: list[Setting]) -> list[tuple[tuple[int, int], list[Setting]]]:
    """Return settings by ranks and rate. The settings of a group run on the same processes."""

    def key(setting: Setting) -> tuple[int, int]:
        return setting.ranks, setting.rate_mbit

    return [(name, list(part)) for name, part in itertools.groupby(sorted(left, key=key), key)]


def run(left: list[Setting], cluster: Cluster, rounds: int, stop: float, keep: Any) -> bool:
    """Measure settings until `stop`, and `keep` each row. Returns whether all are done."""
    for (ranks, rate), part in groups(left):
        if time.monotonic() > stop:
            return False
        found = candidates(cluster, ranks)
        where = "links" if rate else "cores"
        kind = "switch" if rate else "loopback"
        with Network(kind, ranks, rate, timeout=300) as network:
            link = joined(network, where, ranks, rounds)
            error = error_of(linked(cluster, where, ranks, link))
            for setting in part:
                if time.monotonic() > stop:
                    return False
                samples = measured(network, setting, found, rounds)
                choice = predicted(setting, cluster, link)
                made, *_ = network(tuned, setting, choice, error)
                taken = {str(x.candidate): x.measured for x in made.ranked if x.measured}
                auto = {"chosen": str(made.candidate), "measured": taken}
                row = {"setting": setting._asdict(), "link": asdict(link), "auto": auto}
                keep(row | {"samples": samples})
    return True


ARGUMENTS = {
    "--settings": 100,
    "--seed": (0, "seed of the first setting; others follow it"),
    "--rounds": 5,
    "--seconds": (420.0, "begin no setting after this time"),
    "--tokens": ([2048, 16384], "from, to"),
    "--no-links": (False, "only on cores, without root"),
    "--folder": (RESULTS, "folder of the result files"),
}


def main() -> int:
    options = harness.arguments_of(__doc__, ARGUMENTS)
    if not options.no_links and (missing := lacking()):
        raise SystemExit(f"links need {missing}: try --no-links")
    stop = time.monotonic() + options.seconds
    path = harness.results_file(options.folder, "choices")
    known = json.loads(path.read_text()) if path.is_file() else {}
    asked = [*options.tokens, options.rounds, options.no_links]
    if known:
        check_same(path, "of another machine", known["environment"], harness.environment(), SAME)
        check_same(path, "of other options", known, {"asked": asked}, ("asked",))
    else:
        known = {"asked": asked, "rows": []}
    before = harness.canary()
    if "profile" not in known:
        known["profile"] = profiled(machine.devices(), options.rounds).measured
    cluster = Cluster(**describe(known["profile"]))
    done = {row["setting"]["seed"] for row in known["rows"]}
    seeds = range(options.seed, options.seed + options.settings)
    left = [drawn(x, *options.tokens, not options.no_links) for x in seeds if x not in done]
    new: list[Row] = []

    def keep(row: Row) -> None:
        new.append(row)
        found = judged(row, cluster)
        setting = Setting(**row["setting"])
        both = ((found[x], found[y]) for x, y in (("auto", "auto_loss"), ("chosen", "loss")))
        auto, alone = (f"{name}, {loss:+.1%}" for name, loss in both)
        print(f"{setting}: {auto}; by prediction {alone}", flush=True)

    complete = run(left, cluster, options.rounds, stop, keep)
    # After a drift, this raises, and no setting of this start is kept.
    drift = harness.check_canary(before, harness.canary())
    known["rows"] += [row | {"canary_drift": drift} for row in new]
    results = [judged(row, cluster) for row in known["rows"]]
    known.pop("environment", None)
    found = summary(results) if results else {}
    harness.write(options.folder, "choices", known | {"summary": found, "results": results})
    if results:
        print(table(found))
        plot(results, path.with_suffix(".png"))
    return 0 if complete else START_AGAIN


if __name__ == "__main__":
    sys.exit(main())
