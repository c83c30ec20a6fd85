"""Linear attention across ranks: LASP-2 against LASP-1, Ring with the right product, and plain data parallel.

2 and 4 ranks on links of a known rate (`network.py`), in bf16 with a decay a head; the contenders are in
`linear_baselines.py`. On 2 ranks computes are real, one thread a rank. More ranks than cores cannot compute at the same time:
there, and on 2 ranks once more, computes are replaced by sleeps at the rate of the real ones; that results are right is
checked before, without sleeps. A cost model (`linear_model.py`) is fitted to the shortest and the longest sequences on 2 ranks
with sleeps, and predicts all other runs; then it goes to where the paper measured (`linear_paper.py`).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections import defaultdict
from typing import Any

import harness
import linear_model
import linear_paper
import torch
import torch.distributed as dist
from linear_baselines import CONTENDERS
from linear_model import Machine
from network import BURST, Network
from torch import Tensor

from seqpar.comm import Comm

HEADS, DIM = 16, 128  # of the paper's layer: a state is 1 MiB, and a token's keys and values 8 KiB
LOG_DECAY = -torch.logspace(-10, -3, HEADS, base=2, dtype=torch.float64)
PASSES = ("forward", "forward + backward")
PLACES = (("mesh", 2), ("mesh", 4), ("switch", 4))
Row = dict[str, Any]


@functools.lru_cache(2)
def operands(tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and dout of a rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, HEADS, DIM, generator=generator).bfloat16() for _ in range(4)]


def step(contender: str, tokens: int, backward: bool, seed: int = 0) -> list[Tensor]:
    q, k, v, dout = operands(tokens, seed)
    return CONTENDERS[contender](Comm.of(dist.group.WORLD), q, k, v, LOG_DECAY, dout if backward else None)


def error(contender: str, tokens: int) -> float:
    """The largest RMS error of out, dq, dk and dv, over the RMS of what they should be, by their definition in fp64."""
    rank = dist.get_rank()
    ranks = [rank] if contender == "data parallel" else range(dist.get_world_size())
    q, k, v, dout = (torch.cat(x, 1).double() for x in zip(*(operands(tokens, peer) for peer in ranks), strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    i = torch.arange(q.shape[1])
    age = i[:, None] - i
    decay = torch.exp(LOG_DECAY[:, None, None] * age.clamp(min=0)) * (age >= 0)
    out = torch.einsum("bqhd,bkhd,hqk,bkhe->bqhe", q, k, decay, v)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    mine = slice(ranks.index(rank) * tokens, (ranks.index(rank) + 1) * tokens)
    return harness.worst_error(step(contender, tokens, backward=True, seed=rank), [x[:, mine] for x in expected])


def timed(contender: str, tokens: int, backward: bool, seconds_per_area: float | None) -> dict[str, float]:
    comm = Comm.of(dist.group.WORLD)
    return harness.exposed(lambda: step(contender, tokens, backward), comm, 1, seconds_per_area)


def measure(network: Network, lengths: list[int], rounds: int, seconds_per_area: float | None) -> list[Row]:
    """A row for each contender, length and pass: medians of rounds in which all take turns."""
    samples = defaultdict(list)
    cases = [(contender, tokens, passes) for tokens in lengths for passes in PASSES for contender in CONTENDERS]
    for _ in range(rounds):
        for case in cases:
            contender, tokens, passes = case
            print(f"\r{network.topology}, {network.ranks} ranks: {contender}, {tokens} tokens{'':20}", end="", file=sys.stderr)
            found = network(timed, contender, tokens, passes != PASSES[0], seconds_per_area)
            samples[case].append(found[0] | {"bytes": max(x["bytes"] for x in found)})
    print(file=sys.stderr)
    rows = []
    for (contender, tokens, passes), found in samples.items():
        row: Row = {"topology": network.topology, "ranks": network.ranks, "rate_mbit": network.rate_mbit}
        row |= {"computes": "real" if seconds_per_area is None else "sleeps"}
        row |= {"contender": contender, "tokens": tokens, "pass": passes}
        rows.append(row | {key: statistics.median(x[key] for x in found) for key in found[0] if key != "fraction"})
    return rows


def parts(row: Row) -> list[linear_model.Pass]:
    return linear_model.passes(row["tokens"], HEADS, DIM)[: 1 + (row["pass"] != PASSES[0])]


def shape(row: Row) -> Machine:
    """The machine of a row, but for its constants."""
    return Machine(row["ranks"], 0.0, 0.0, 0.0, ports=int(row["topology"] == "switch"), burst=BURST)


def predict(rows: list[Row]) -> dict[str, float]:
    """Fit the model's constants, and add to each row what it predicts, and whether the row was fitted."""
    lengths = {row["tokens"] for row in rows}
    ends = min(lengths), max(lengths)
    for row in rows:
        row["fitted"] = row["ranks"] == 2 and row["computes"] == "sleeps" and row["tokens"] in ends
    constants = linear_model.fit(
        [
            (row["contender"], shape(row), parts(row), row["without_communication"], row["communication"])
            for row in rows
            if row["fitted"]
        ]
    )
    for row in rows:
        machine = linear_model.replace(shape(row), **constants)
        row["predicted"] = linear_model.seconds(row["contender"], machine, parts(row))
    return constants


def errors(rows: list[Row]) -> dict[str, dict[str, float]]:
    """The model's errors on runs that it was not fitted to, by where they ran."""
    by_place = defaultdict(list)
    for row in rows:
        if not row["fitted"]:
            by_place[f"{row['topology']}, {row['ranks']} ranks, {row['computes']}"].append(
                abs(row["predicted"] / row["total"] - 1)
            )
    return {
        place: {
            "median": statistics.median(found),
            "worst": max(found),
            "within_15_percent": sum(x <= 0.15 for x in found) / len(found),
        }
        for place, found in by_place.items()
    }


def show(rows: list[Row], constants: dict[str, float]) -> None:
    for row in rows:
        print(
            f"{row['topology']:6} {row['ranks']} ranks, {row['computes']:6} {row['tokens']:6} tokens, {row['pass']:18} "
            f"{row['contender']:18} {row['total'] * 1e3:7.0f} ms, {row['total'] / row['without_communication']:6.2f} × without "
            f"communication, {row['bytes'] / 2**20:6.1f} MiB, predicted {row['predicted'] * 1e3:7.0f} "
            f"({row['predicted'] / row['total'] - 1:+4.0%}{', fitted' * row['fitted']})"
        )
    print(
        f"\nThe model: {constants['call'] * 1e3:.2f} ms a pass, {constants['latency'] * 1e3:.2f} ms a message, "
        f"{8e-6 / constants['byte']:.0f} Mbit/s, {constants['area'] * 1e9:.2f} ns a unit of area"
    )
    for place, found in errors(rows).items():
        print(
            f"held out, {place}: off by {found['median']:.1%} (median), {found['worst']:.1%} at most; "
            f"{found['within_15_percent']:.0%} of the runs within 15%"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 4096], help="a rank")
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s of a link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="print, and write no result files")
    options = parser.parse_args()
    before, rows, area_seconds = harness.canary(), [], 0.0
    for topology, ranks in PLACES:
        with Network(topology, ranks, options.rate) as network:
            for contender in CONTENDERS:
                wrong = max(network(error, contender, 64))
                if wrong > 0.02:
                    raise SystemExit(f"{contender} is wrong by {wrong:.1%}: nothing was timed")
            if not area_seconds:  # on 2 ranks, the first place
                rows += measure(network, options.tokens, options.rounds, None)
                own = next(
                    row
                    for row in reversed(rows)
                    if row["contender"] == "data parallel" and row["tokens"] == max(options.tokens)
                )
                area_seconds = own["total"] / sum(part.area for part in parts(own))
            rows += measure(network, options.tokens, options.rounds, area_seconds)
    drift = abs(harness.canary() / before - 1)
    constants = predict(rows)
    show(rows, constants)
    print(f"the canary drifted by {drift:.1%}")
    paper = linear_paper.show()
    if not options.no_write:
        setting = {"heads": HEADS, "head_dim": DIM, "dtype": "bf16", "rounds": options.rounds, "canary_drift": drift}
        model = {"constants": constants, "held_out_errors": errors(rows)}
        harness.write("linear", {"setting": setting, "rows": rows, "model": model, "paper": paper})
        plot(rows, paper)
    return 0


def plot(rows: list[Row], paper: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained")
    colors = {contender: f"C{i}" for i, contender in enumerate(linear_paper.CONTENDERS)}
    for axis, topology in zip(axes, ("mesh", "switch"), strict=False):
        for contender in CONTENDERS:
            chosen = [
                row
                for row in rows
                if (row["topology"], row["ranks"], row["pass"], row["contender"]) == (topology, 4, PASSES[1], contender)
            ]
            tokens = [row["tokens"] for row in chosen]
            axis.plot(tokens, [row["total"] * 1e3 for row in chosen], "o", color=colors[contender], label=contender)
            axis.plot(tokens, [row["predicted"] * 1e3 for row in chosen], "-", color=colors[contender])
        axis.set(
            xscale="log", yscale="log", xlabel="tokens a rank", title=f"4 ranks, {topology}", ylabel="forward + backward, ms"
        )
    axes[0].legend(title="dots: measured, lines: model", fontsize=8)
    lengths = [row["tokens"] for row in paper]
    for contender in linear_paper.CONTENDERS:
        rates = [row["tokens_per_second"][contender] for row in paper]
        axes[2].plot(lengths, rates, "-", color=colors[contender], label=contender)
    known = [row for row in paper if row["published"]]
    axes[2].plot([row["tokens"] for row in known], [row["published"] for row in known], "ko", label="published LASP-2")
    axes[2].set(xscale="log", yscale="log", xlabel="tokens", ylabel="tokens/s", title="64 A100, by the model")
    axes[2].legend(fontsize=8)
    figure.savefig(harness.RESULTS / "linear.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
