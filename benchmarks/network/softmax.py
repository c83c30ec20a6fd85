"""Measure softmax strategies' communication on links of a known rate, and its exposed share.

4 ranks on a mesh of links and on a switch (`emulated.py`) compute attention with multiple heads, in
bf16, without a mask. More ranks than cores cannot compute simultaneously, so sleeps replace
computes, with the same time per query-key pair. Results are first checked without sleeps. `ratio`
is the compute time of a step of Ring over its transfer time. On 2, 4 and 8 ranks of a switch the
program also measures how communication grows.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from benchmarks import RESULTS, harness
from benchmarks.network.emulated import Network
from seqpar import Layout
from seqpar.core.hooks import hooks

RANKS, HEADS, DIM = 4, 8, 64
UNIT = HEADS * DIM * 2  # bytes of q, k or v per token
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "token_ring, fp32 partials": ("token_ring", {}),
    "token_ring, bf16 partials": ("token_ring", {"partial_dtype": torch.bfloat16}),
    "all_gather": ("all_gather", {}),
    "ulysses, 1 head group": ("ulysses", {"head_groups": 1}),
    "ulysses, 2 head groups": ("ulysses", {"head_groups": 2}),
    "usp 2 x 2, ring": ("usp", {}),
}
NAME = "network-softmax"  # of the result files
Row = dict[str, Any]
PASSES = ("forward", "forward + backward")


@functools.cache
def module(contender: str) -> torch.nn.Module:
    """Return a contender's module on all ranks."""
    name, options = CONTENDERS[contender]
    group = init_device_mesh("cpu", (2, RANKS // 2)) if name == "usp" else dist.group.WORLD
    return seqpar.make_attention(name, group, **options)


def operands(local: int, seed: int) -> list[Tensor]:
    """Return q, k, v and dout of a rank, each (local, heads, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(local, HEADS, DIM, generator=generator).bfloat16() for _ in range(4)]


def step(contender: str, local: int, backward: bool, seed: int = 0) -> list[Tensor]:
    """Return out and the gradients of q, k and v, of a call with `local` tokens per rank."""
    layout = Layout.contiguous(local * dist.get_world_size(), dist.get_world_size())
    *leaves, dout = operands(local, seed)
    out = module(contender)(*(x.requires_grad_(backward) for x in leaves), layout, causal=False)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if backward else ())]


def error(contender: str, local: int) -> float:
    """Return the largest RMS error of out, dq, dk and dv, over the RMS of the expected results.

    Those are computed in fp64 from all ranks' tokens.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = []
    for peer in range(ranks):
        parts.append([x.double() for x in operands(local, peer)])
    q, k, v, dout = (torch.cat(x).transpose(0, 1) for x in zip(*parts, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves)
    expected = [whole, *torch.autograd.grad(whole, leaves, dout)]
    mine = slice(rank * local, (rank + 1) * local)
    got = step(contender, local, backward=True, seed=rank)
    return harness.worst_error(got, [x.transpose(0, 1)[mine] for x in expected])


def sent_bytes(contender: str) -> int:
    """Return the bytes that this rank has sent so far in calls of a contender."""
    return module(contender).sent_bytes


def exposed(
    contender: str, local: int, backward: bool, pair_seconds: float, rounds: int
) -> dict[str, Any]:
    """Return the exposure of a step with sleeps as computes, and the bytes that a rank sends."""
    return harness.exposed(
        lambda: step(contender, local, backward),
        dist.group.WORLD,
        lambda: sent_bytes(contender),
        rounds,
        pair_seconds,
    )


def communication(contender: str, local: int, rounds: int) -> list[float]:
    """Return this rank's seconds of forward and backward without compute, round by round."""
    times = []
    with hooks.set(replace_compute=lambda area: None):
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            step(contender, local, backward=True)
            times.append(time.perf_counter() - start)
    return times[1:]


def main() -> int:
    """Measure the selected settings, print them, and add them to the result files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="a rank")
    parser.add_argument(
        "--rates", type=int, nargs="*", default=[100, 200], help="rates of a link, Mbit/s"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[0.5, 1.5],
        help="ratios at the first rate; other rates use the last",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--topologies", nargs="*", default=["mesh", "switch"])
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS], choices=[*CONTENDERS])
    parser.add_argument(
        "--growth",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure growth on 2, 4 and 8 ranks",
    )
    parser.add_argument("--no-write", action="store_true", help="only print: write no result files")
    options = parser.parse_args()
    before, rows = harness.canary(), []
    for topology in options.topologies:
        for rate in options.rates:
            ratios = options.ratios if rate == options.rates[0] else options.ratios[-1:]
            with Network(topology, RANKS, rate) as network:
                rows += measure(network, options, ratios)
    growth = grown(options) if options.growth else []
    drift = harness.drift(before, harness.canary())
    print(f"the canary drifted by {drift:.1%}")
    commit = harness.environment()["commit"]
    rows = [
        row | {"rounds": options.rounds, "canary_drift": drift, "commit": commit} for row in rows
    ]
    if not options.no_write:
        keep(rows, growth, options.tokens)
    return 0


def keep(rows: list[Row], growth: list[Row], tokens: int) -> None:
    """Write the result files, and keep earlier rows of the same shape."""
    shape = {"ranks": RANKS, "tokens_per_rank": tokens}
    shape |= {"heads": HEADS, "head_dim": DIM, "dtype": "bf16"}
    file = harness.results_file(RESULTS, NAME)
    if file.exists() and (earlier := json.loads(file.read_text()))["shape"] == shape:
        again = set(map(identity, rows))
        rows = rows + [row for row in earlier["rows"] if identity(row) not in again]
        growth = growth or earlier["growth"]
    order = [*CONTENDERS]
    rows = sorted(rows, key=lambda row: (place(row), order.index(row["contender"]), row["pass"]))
    path = harness.write(RESULTS, NAME, {"shape": shape, "rows": rows, "growth": growth})
    plot(rows, growth, path.with_suffix(".png"))


def measure(network: Network, options: argparse.Namespace, ratios: list[float]) -> list[Row]:
    """Return a row for each contender, pass and ratio."""
    transfer = 2 * UNIT * options.tokens * 8 / (network.rate_mbit * 1e6)  # of a step of Ring
    pairs = options.tokens**2 * HEADS
    rows: list[Row] = []
    for contender in options.contenders:
        wrong = max(network(error, contender, 64))
        if wrong > 0.02:
            raise SystemExit(f"{contender} has an error of {wrong:.1%}: no times were measured")
        for passes, ratio in itertools.product(PASSES, ratios):
            seconds = ratio * transfer / pairs
            backward = passes != "forward"
            found = network(exposed, contender, options.tokens, backward, seconds, options.rounds)
            row = {"topology": network.topology, "rate_mbit": network.rate_mbit}
            row |= {"contender": contender, "pass": passes, "ratio": ratio}
            rows.append(row | found[0] | {"bytes": max(x["bytes"] for x in found)})
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print a row."""
    whole, without, alone = (
        f"{row[key] * 1e3:6.0f}" for key in ("total", "without_communication", "communication")
    )
    low, high = row["spread"]
    print(
        f"{row['topology']:7}{row['rate_mbit']:5} Mbit/s {row['contender']:26}{row['pass']:19} "
        f"compute {row['ratio']:3}: {whole} ms, without communication {without}, communication "
        f"{alone}, exposed {row['fraction']:4.0%} ({low:.0%} to {high:.0%}), "
        f"{row['bytes'] / 2**20:5.1f} MiB",
        flush=True,
    )


def grown(options: argparse.Namespace) -> list[Row]:
    """Return the time of communication on a switch as ranks and tokens grow together."""
    rows: list[Row] = []
    rate = min(options.rates)
    for ranks in (2, 4, 8):
        with Network("switch", ranks, rate) as network:
            for contender in ("ring", "ulysses, 1 head group"):
                rounds = zip(
                    *network(communication, contender, options.tokens, options.rounds), strict=True
                )
                seconds = statistics.median_low(max(times) for times in rounds)
                row = {"ranks": ranks, "rate_mbit": rate, "contender": contender}
                rows.append(row | {"seconds": seconds})
                tokens = options.tokens * ranks
                print(
                    f"{ranks} ranks, {tokens} tokens, {contender}: {seconds * 1e3:.0f} ms",
                    flush=True,
                )
    return rows


def place(row: Row) -> tuple[str, int, float]:
    """Return the place of a row."""
    return row["topology"], row["rate_mbit"], row["ratio"]


def identity(row: Row) -> tuple[Any, ...]:
    """Return the key of a row."""
    return *place(row), row["contender"], row["pass"]


def plot(rows: list[Row], growth: list[Row], path: Path) -> None:
    """Draw the rows, one panel per pass, and the growth of communication."""
    places = list(dict.fromkeys(map(place, rows)))
    figure, axes = harness.pyplot().subplots(3, 1, figsize=(12, 12), layout="constrained")
    for axis, passes in zip(axes, PASSES, strict=False):
        for i, contender in enumerate(CONTENDERS):
            chosen = [
                row for row in rows if row["contender"] == contender and row["pass"] == passes
            ]
            at = [places.index(place(row)) + i * 0.12 for row in chosen]
            bars = axis.bar(at, [row["total"] * 1e3 for row in chosen], 0.11, label=contender)
            axis.bar_label(bars, [f"{max(row['fraction'], 0):.0%}" for row in chosen], fontsize=6)
        names = [
            f"{topology}, {rate} Mbit/s,\ncompute {ratio} of Ring's transfer"
            for topology, rate, ratio in places
        ]
        axis.set_xticks([x + 0.36 for x in range(len(places))], names, fontsize=8)
        axis.set_ylabel(f"{passes}, ms (label: exposed)")
    axes[0].legend(fontsize=7, ncols=4, loc="upper left")
    axes[0].margins(y=0.3)
    for contender in dict.fromkeys(row["contender"] for row in growth):
        chosen = [row for row in growth if row["contender"] == contender]
        seconds = [row["seconds"] * 1e3 for row in chosen]
        axes[2].plot([row["ranks"] for row in chosen], seconds, "o-", label=contender)
    axes[2].set_xlabel("ranks on a switch, equal tokens per rank")
    axes[2].set_ylabel("communication of forward + backward, ms")
    axes[2].set_ylim(0)
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
