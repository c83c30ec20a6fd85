"""Compare planned steps on this machine's ranks with their predictions and with other layouts.

Single-threaded ranks on gloo train layers of attention and an MLP on documents of uneven length
(Pretrain's, scaled down): forward and backward of one step with the layout of `balance.plan`, with
zigzag for all documents, and with contiguous packing. Each is first checked against one process.
Predictions use a profile of this machine from the same run, measured while all cores are busy,
because they share caches and memory. Rounds interleave the plans.

If every rank has a core, a step's time is wall-clock time from a barrier until the last rank ends.
More ranks than cores cannot compute simultaneously: a rank's time is then its CPU time, including
its threads that move messages, and a step's time is the slowest rank's. On 2 cores both are
measured for 2 ranks.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.balance.documents import draw
from benchmarks.balance.rank import MODEL, checked, expected, step
from benchmarks.network.emulated import Network
from seqpar import balance
from seqpar.core.arguments import Ints
from seqpar.costs.fit import describe
from seqpar.costs.profile import machine

Row = dict[str, Any]
METHODS = ("auto", "zigzag", "contiguous")
SLACK = 1.25  # capacity over the mean of tokens
PROFILE_ROUNDS = 5
TOLERANCE = 1e-4  # of losses and gradients in fp32, relative, against one process


def seconds_of(found: list[Row], kind: str) -> float:
    """Return a step's seconds: each micro-batch takes as long as its slowest rank."""
    return sum(max(times) for times in zip(*(x[kind] for x in found), strict=True))


def measured(cluster: balance.Cluster, options: Namespace, ranks: int) -> list[Row]:
    """Return a row for each context and seed: methods' predicted and measured seconds."""
    rows = []
    cells = list(itertools.product(options.contexts, options.seeds))
    node = Network("loopback", ranks, timeout=600)
    with node as network, harness.progress(len(cells)) as begin:
        for context, seed in cells:
            begin(f"{ranks} ranks, documents of at most {context} tokens, seed {seed}")
            lengths = draw("pretrain", options.tokens * ranks, context, seed)
            of_ranks = replace(cluster, devices_per_node=ranks)
            methods = compare(network, lengths, of_ranks, options)
            documents = {"context": context, "seed": seed, "documents": lengths.tolist()}
            rows.append({"ranks": ranks} | documents | {"methods": methods})
    return rows


def compare(
    network: Network, lengths: Ints, cluster: balance.Cluster, options: Namespace
) -> dict[str, Row]:
    """Return each method's predicted seconds, and the measured seconds of each round."""
    capacity = int(SLACK * options.tokens)
    plans = {
        method: balance.plan(lengths, cluster, MODEL, capacity=capacity, method=method)
        for method in METHODS
    }
    texts = {method: plan.to_json() for method, plan in plans.items()}
    check(network, lengths.tolist(), texts)
    kinds = ["core"] if network.ranks > machine.devices() else ["clock", "core"]
    found: dict[str, Row] = {
        method: {
            "chosen": plan.method,
            "predicted": plan.seconds,
            "over_bound": plan.seconds / plan.bound,
            "predicted_bytes": sum(x.bytes for x in plan.micro_batches).tolist(),
            "seconds": {kind: [] for kind in kinds},
        }
        for method, plan in plans.items()
    }
    for _, method in harness.turns(METHODS, options.rounds):
        answers = network(step, texts[method])
        found[method]["bytes"] = [x["bytes"] for x in answers]
        for kind in kinds:
            found[method]["seconds"][kind].append(seconds_of(answers, kind))
    for row in found.values():
        row["medians"] = {kind: statistics.median(x) for kind, x in row["seconds"].items()}
    return found


def check(network: Network, lengths: list[int], texts: dict[str, str]) -> None:
    """Exit if a plan's loss or gradients differ from one process's."""
    with machine.one_thread():
        exact = expected(lengths)
    for method, text in texts.items():
        wrong = max(harness.worst_error(found, exact) for found in network(checked, text))
        harness.check_error(method, wrong, TOLERANCE)


def table(rows: list[Row]) -> str:
    """Return a table of measured over predicted seconds, and of methods over auto."""
    head = ["ranks", "longest document", "documents", "time", "auto, ms"]
    head += [f"{method}, measured / predicted" for method in METHODS]
    head += [f"{method} / auto" for method in METHODS[1:]]
    lines = []
    for row in rows:
        methods = row["methods"]
        for kind, auto in methods["auto"]["medians"].items():
            cells = [str(row["ranks"]), f"{row['context']:,}", str(len(row["documents"])), kind]
            cells.append(f"{1e3 * auto:,.0f}")
            cells += [f"{x['medians'][kind] / x['predicted']:.3f}" for x in methods.values()]
            cells += [f"{methods[method]['medians'][kind] / auto:.3f}" for method in METHODS[1:]]
            lines.append(cells)
    return harness.table(head, lines)


def plot(results: Row, path: Path) -> None:
    rows = results["rows"]
    numbers = list(dict.fromkeys(row["ranks"] for row in rows))
    figure, axes = harness.pyplot().subplots(
        len(numbers), 1, figsize=(11, 3.5 * len(numbers)), layout="constrained", squeeze=False
    )
    for axis, ranks in zip(axes[:, 0], numbers, strict=True):
        bars = [
            (row, method, found)
            for row in rows
            if row["ranks"] == ranks
            for method, found in row["methods"].items()
        ]
        places = range(len(bars))
        axis.bar(places, [x["predicted"] for *_, x in bars], 0.8, color="0.85", label="predicted")
        for kind in bars[0][2]["medians"]:
            i = ("core", "clock").index(kind)
            for place, (*_, found) in enumerate(bars):
                at = place - 0.2 * i + 0.1
                label = f"median by the {kind}" if place == 0 else None
                axis.plot(at, found["medians"][kind], "o", color=f"C{i}", ms=4, label=label)
                times = found["seconds"][kind]
                axis.plot([at] * len(times), times, "_", color=f"C{i}", alpha=0.5)
        names = [f"{method}\n{row['context']}, seed {row['seed']}" for row, method, _ in bars]
        axis.set_xticks(places, names, fontsize=7)
        axis.set(title=f"{ranks} ranks", ylabel="seconds of a step")
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def measure(options: Namespace) -> Row:
    with Network("loopback", machine.devices(), timeout=600) as network:
        cluster = balance.Cluster(**describe(network(machine.profile, PROFILE_ROUNDS)[0]))
    rows = [row for ranks in options.ranks for row in measured(cluster, options, ranks)]
    print(table(rows))
    shape = {"tokens_per_rank": options.tokens, "layers": len(MODEL.layers)}
    shape |= {"hidden": MODEL.hidden, "heads": MODEL.heads, "head_dim": MODEL.head_dim}
    shape |= {"ffn": MODEL.layers[0].ffn, "dtype": "fp32"}
    return {"shape": shape, "profile": cluster.measured, "rows": rows}


ARGUMENTS = {
    "--tokens": (4096, "a rank"),
    "--contexts": ([4096, 2048], "the longest documents"),
    "--seeds": ([0, 1], "seeds of the lengths"),
    "--ranks": [2, 4],
    "--rounds": 7,
}

if __name__ == "__main__":
    harness.run("balance-ranks", __doc__, ARGUMENTS, measure, plot)
