"""Compare steps on a mesh of 4 or 9 ranks with Ring's and other strategies' steps.

Ranks have a separate link to each other rank (`mesh`), or one link to a switch (`emulated.py`).
Attention has multiple heads, in bf16, without a mask, as in `softmax.py`. More ranks than cores
cannot compute simultaneously, so sleeps replace computes, with the same time per query-key pair in
forward and backward. Results are first checked without sleeps. `ratio` is the compute time of a
step of Ring over its transfer time in forward; 0 means only communication. Rounds interleave the
contenders.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from benchmarks import RESULTS, harness
from benchmarks.network.emulated import Network
from benchmarks.network.softmax import DIM, HEADS, PASSES, UNIT, Row, operands
from seqpar import Layout
from seqpar.core.hooks import hooks

BF16 = {"partial_dtype": torch.bfloat16}
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "all_gather": ("all_gather", {}),
    "token_ring": ("token_ring", {}),
    "mesh": ("mesh", {}),
    "token_ring, bf16 partials": ("token_ring", BF16),
    "mesh, bf16 partials": ("mesh", BF16),
}
NAME = "network-mesh"  # of the result files


@functools.cache
def module(contender: str) -> torch.nn.Module:
    """Return a contender's module on all ranks."""
    name, options = CONTENDERS[contender]
    side = math.isqrt(dist.get_world_size())
    group = init_device_mesh("cpu", (side, side)) if name == "mesh" else dist.group.WORLD
    return seqpar.make_attention(name, group, **options)


def step(contender: str, local: int, backward: bool, seed: int = 0) -> list[torch.Tensor]:
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
    parts = [[x.double() for x in operands(local, peer)] for peer in range(ranks)]
    q, k, v, dout = (torch.cat(x).transpose(0, 1) for x in zip(*parts, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves)
    expected = [whole, *torch.autograd.grad(whole, leaves, dout)]
    mine = slice(rank * local, (rank + 1) * local)
    got = step(contender, local, backward=True, seed=rank)
    return harness.worst_error(got, [x.transpose(0, 1)[mine] for x in expected])


def timed(contender: str, local: int, backward: bool, pair_seconds: float) -> tuple[float, int]:
    """Return this rank's seconds of a step with sleeps as computes, and the bytes it sends."""
    before = module(contender).sent_bytes
    dist.barrier()
    start = time.perf_counter()
    with hooks.set(replace_compute=lambda area: time.sleep(area * pair_seconds)):
        step(contender, local, backward)
    dist.barrier()
    return time.perf_counter() - start, module(contender).sent_bytes - before


def measure(network: Network, options: argparse.Namespace) -> list[Row]:
    """Return a row for each contender, pass and ratio."""
    for contender in options.contenders:
        if (wrong := max(network(error, contender, 32))) > 0.02:
            raise SystemExit(f"{contender} has an error of {wrong:.1%}: no times were measured")
    transfer = 2 * UNIT * options.tokens * 8 / (network.rate_mbit * 1e6)  # of a step of Ring
    rows: list[Row] = []
    for passes, ratio in itertools.product(PASSES, options.ratios):
        pair_seconds = ratio * transfer / (options.tokens**2 * HEADS)
        call = options.tokens, passes != PASSES[0], pair_seconds
        samples: dict[str, list[float]] = {contender: [] for contender in options.contenders}
        sent = {}
        for _ in range(options.rounds):
            for contender, times in samples.items():
                found = network(timed, contender, *call)
                times.append(max(seconds for seconds, _ in found))
                sent[contender] = max(size for _, size in found)
        place = {"topology": network.topology, "ranks": network.ranks}
        place |= {"rate_mbit": network.rate_mbit, "pass": passes, "ratio": ratio}
        for contender, times in samples.items():
            figures = {"contender": contender, "seconds": statistics.median(times)}
            if "ring" in samples:  # per round, so that a slow minute affects both
                gains = [a / b for a, b in zip(samples["ring"], times, strict=True)]
                figures |= {"gain": statistics.median(gains), "spread": harness.quartiles(gains)}
            rows.append(place | figures | {"samples": times, "bytes": sent[contender]})
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print a row."""
    gain = f", {row['gain']:.2f} times as fast as Ring" if "gain" in row else ""
    print(
        f"{row['ranks']} ranks, {row['topology']:7}{row['rate_mbit']:4} Mbit/s {row['pass']:19} "
        f"compute {row['ratio']:3}: {row['contender']:26}{row['seconds'] * 1e3:6.0f} ms"
        f"{gain}, {row['bytes'] / 2**20:5.1f} MiB",
        flush=True,
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw each contender's speed over Ring's, one panel per place and pass."""
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


def main() -> int:
    """Measure the selected settings, print them, and write the result files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="a rank")
    parser.add_argument("--rate", type=int, default=40, help="rate of a link, Mbit/s")
    parser.add_argument("--ratios", type=float, nargs="*", default=[0, 0.5, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 9], choices=[4, 9, 16])
    parser.add_argument("--topologies", nargs="*", default=["mesh", "switch"])
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS], choices=[*CONTENDERS])
    parser.add_argument("--no-write", action="store_true", help="only print: write no result files")
    options = parser.parse_args()
    before, rows = harness.canary(), []
    for topology, ranks in itertools.product(options.topologies, options.ranks):
        with Network(topology, ranks, options.rate, timeout=300) as network:
            rows += measure(network, options)
    drift = harness.drift(before, harness.canary())
    print(f"the canary drifted by {drift:.1%}")
    if not options.no_write:
        shape = {"tokens_per_rank": options.tokens, "heads": HEADS, "head_dim": DIM}
        shape |= {"dtype": "bf16", "rounds": options.rounds, "canary_drift": drift}
        path = harness.write(RESULTS, NAME, {"shape": shape, "rows": rows})
        plot(rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
