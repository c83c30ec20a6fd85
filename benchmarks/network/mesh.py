"""Compare steps on a mesh of 4 or 9 ranks with Ring's and other strategies' steps.

Ranks have a separate link to each other rank (`mesh`), or one link to a switch (`emulated.py`).
Attention has multiple heads, in bf16, without a mask, as in `softmax.py`. More ranks than cores
cannot compute simultaneously, so sleeps replace computes, with the same time per query-key pair in
forward and backward. Results are first checked without sleeps. `ratio` is the compute time of a
step of Ring over its transfer time in forward; 0 means only communication. Rounds interleave the
contenders.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.network.emulated import Network
from benchmarks.network.softmax import (
    BF16,
    DIM,
    HEADS,
    LARGEST_ERROR,
    PASSES,
    Contender,
    Row,
    error,
    step,
    transfer_seconds,
)
from benchmarks.steps import module

CONTENDERS: dict[str, Contender] = {
    "ring": ("ring", {}),
    "all_gather": ("all_gather", {}),
    "token_ring": ("token_ring", {}),
    "mesh": ("mesh", {}),
    "token_ring, bf16 partials": ("token_ring", BF16),
    "mesh, bf16 partials": ("mesh", BF16),
}


def timed(
    contender: Contender, local: int, backward: bool, pair_seconds: float
) -> tuple[float, int]:
    """Return this rank's seconds of a step with sleeps as computes, and the bytes it sends."""
    strategy, options = contender
    attn = module(strategy, **options)
    before = attn.sent_bytes
    with harness.sleeping(pair_seconds):
        seconds = step(local, backward).seconds(attn)
    return seconds, attn.sent_bytes - before


def measured(network: Network, options: Namespace) -> list[Row]:
    """Return a row for each contender, pass and ratio."""
    for name in options.contenders:
        harness.check_error(name, max(network(error, CONTENDERS[name], 32)), LARGEST_ERROR)
    of_a_pair = transfer_seconds(network, options.tokens) / (options.tokens**2 * HEADS)
    rows: list[Row] = []
    for passes, ratio in itertools.product(PASSES, options.ratios):
        samples: dict[str, list[float]] = {name: [] for name in options.contenders}
        sent = {}
        for _, name in harness.turns(options.contenders, options.rounds):
            call = options.tokens, PASSES[passes], ratio * of_a_pair
            found = network(timed, CONTENDERS[name], *call)
            samples[name].append(max(seconds for seconds, _ in found))
            sent[name] = max(size for _, size in found)
        place = {"topology": network.topology, "ranks": network.ranks}
        place |= {"rate_mbit": network.rate_mbit, "pass": passes, "ratio": ratio}
        for name, times in samples.items():
            figures = {"contender": name, "seconds": statistics.median(times)}
            if "ring" in samples:  # per round, so that a slow minute affects both
                gains = [a / b for a, b in zip(samples["ring"], times, strict=True)]
                figures |= {"gain": statistics.median(gains), "spread": harness.quartiles(gains)}
            rows.append(place | figures | {"samples": times, "bytes": sent[name]})
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    gain = f", {row['gain']:.2f} times as fast as Ring" if "gain" in row else ""
    print(
        f"{row['ranks']} ranks, {row['topology']:7}{row['rate_mbit']:4} Mbit/s {row['pass']:19} "
        f"compute {row['ratio']:3}: {row['contender']:26}{row['seconds'] * 1e3:6.0f} ms"
        f"{gain}, {row['bytes'] / 2**20:5.1f} MiB",
        flush=True,
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw each contender's speed over Ring's, one panel per place and pass."""
    rows = results["rows"]
    key = lambda row: (row["topology"], row["ranks"])  # noqa: E731
    places = list(dict.fromkeys(map(key, rows)))
    size = 4.5 * len(places), 7.5
    figure, axes = harness.pyplot().subplots(
        2, len(places), figsize=size, layout="constrained", squeeze=False, sharey="row"
    )
    for (i, passes), (j, place) in itertools.product(enumerate(PASSES), enumerate(places)):
        chosen = [row for row in rows if key(row) == place and row["pass"] == passes]
        for contender in dict.fromkeys(row["contender"] for row in chosen):
            line = [row for row in chosen if row["contender"] == contender]
            gains = [row["gain"] for row in line]
            axes[i, j].plot([row["ratio"] for row in line], gains, "o-", label=contender)
        axes[i, j].set_title(f"{passes}: {place[1]} ranks, {place[0]}", fontsize=9)
        axes[i, j].set_xlabel("compute of a step of Ring, over its transfer", fontsize=8)
        axes[i, j].set_ylim(0)
        axes[i, j].grid(color="0.9")
    for axis in axes[:, 0]:
        axis.set_ylabel("times as fast as Ring")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def measure(options: Namespace) -> dict[str, Any]:
    rows = []
    for topology, ranks in itertools.product(options.topologies, options.ranks):
        with Network(topology, ranks, options.rate, timeout=300) as network:
            rows += measured(network, options)
    shape = {"tokens_per_rank": options.tokens, "heads": HEADS, "head_dim": DIM}
    shape |= {"dtype": "bf16", "rounds": options.rounds}
    return {"shape": shape, "rows": rows}


ARGUMENTS = {
    "--tokens": (512, "a rank"),
    "--rate": (40, "rate of a link, Mbit/s"),
    "--ratios": [0.0, 0.5, 1.0, 2.0],
    "--rounds": 3,
    "--ranks": ([4, 9], None, [4, 9, 16]),
    "--topologies": ["mesh", "switch"],
    "--contenders": ([*CONTENDERS], None, [*CONTENDERS]),
}

if __name__ == "__main__":
    harness.run("network-mesh", __doc__, ARGUMENTS, measure, plot, canary_is="recorded")
