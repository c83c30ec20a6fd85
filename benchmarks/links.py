"""Every strategy on links of a known rate: time, what of its communication is exposed, and bytes.

4 ranks on a mesh of links and behind a switch (`network.py`), multi-head attention in bf16 without a mask. More ranks than
cores cannot compute at the same time, so computes are replaced by sleeps, as long for each pair of query and key; that the
results are right is checked before, without sleeps. `ratio` is how long a step's compute of Ring takes, in units of its
step's transfer. And on 2, 4 and 8 ranks behind a switch: the time of communication as tokens grow with ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from network import Network
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar import Layout, tracing

RANKS, HEADS, DIM = 4, 8, 64
UNIT = HEADS * DIM * 2  # bytes a token of q, k or v
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "token_ring, fp32 partials": ("token_ring", {}),
    "token_ring, bf16 partials": ("token_ring", {"partial_dtype": torch.bfloat16}),
    "all_gather": ("all_gather", {}),
    "ulysses, 1 head group": ("ulysses", {"head_groups": 1}),
    "ulysses, 2 head groups": ("ulysses", {"head_groups": 2}),
    "usp 2 x 2, ring": ("usp", {}),
}
PASSES = ("forward", "forward + backward")


@functools.cache
def module(contender: str) -> seqpar.RingAttention:
    name, options = CONTENDERS[contender]
    group = init_device_mesh("cpu", (2, RANKS // 2)) if name == "usp" else dist.group.WORLD
    return seqpar.make_attention(name, group, **options)


def step(contender: str, local: int, backward: bool, seed: int = 0) -> list[Tensor]:
    """A call on `local` tokens a rank: out and the gradients of q, k and v."""
    layout = Layout.contiguous(local * dist.get_world_size(), dist.get_world_size())
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(local, HEADS, DIM, generator=generator).bfloat16() for _ in range(4))
    operands = [x.requires_grad_(backward) for x in (q, k, v)]
    out = module(contender)(*operands, layout, causal=False)
    return [out.detach(), *(torch.autograd.grad(out, operands, dout) if backward else ())]


def error(contender: str, local: int) -> float:
    """The largest RMS error of out, dq, dk and dv, over the RMS of what it should be (fp64, all ranks' tokens)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = []
    for peer in range(ranks):
        generator = torch.Generator().manual_seed(peer)
        parts.append([torch.randn(local, HEADS, DIM, generator=generator).bfloat16().double() for _ in range(4)])
    q, k, v, dout = (torch.cat(x).transpose(0, 1) for x in zip(*parts, strict=True))
    operands = [x.requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*operands)
    expected = [whole, *torch.autograd.grad(whole, operands, dout)]
    mine = slice(rank * local, (rank + 1) * local)
    got = step(contender, local, backward=True, seed=rank)
    return harness.worst_error(got, [x.transpose(0, 1)[mine] for x in expected])


def exposed(contender: str, local: int, backward: bool, pair_seconds: float, rounds: int) -> dict[str, float]:
    return harness.exposed(lambda: step(contender, local, backward), module(contender).engine.comm, rounds, pair_seconds)


def communication(contender: str, local: int, rounds: int) -> float:
    """Seconds of forward and backward on the slowest rank, without compute: the median of some rounds."""
    comm, times = module(contender).engine.comm, []
    with tracing.compute_replaced(lambda area: None):
        for _ in range(rounds + 1):
            comm.all_gather(torch.zeros(1))
            start = time.perf_counter()
            step(contender, local, backward=True)
            times.append(max(map(float, comm.all_gather(torch.tensor([time.perf_counter() - start])))))
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="a rank")
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 200], help="Mbit/s of a link")
    parser.add_argument("--ratios", type=float, nargs="*", default=[0.5, 1.5], help="at the first rate; at others the last")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--topologies", nargs="*", default=["mesh", "switch"])
    parser.add_argument("--growth", action=argparse.BooleanOptionalAction, default=True, help="measure 2, 4 and 8 ranks too")
    parser.add_argument("--no-write", action="store_true", help="print, and write no result files")
    options = parser.parse_args()
    before, rows = harness.canary(), []
    for topology in options.topologies:
        for rate in options.rates:
            with Network(topology, RANKS, rate) as network:
                rows += measure(network, options, options.ratios if rate == options.rates[0] else options.ratios[-1:])
    growth = grown(options) if options.growth else []
    drift = abs(harness.canary() / before - 1)
    print(f"the canary drifted by {drift:.1%}")
    commit = harness.environment()["commit"]
    rows = [row | {"rounds": options.rounds, "canary_drift": drift, "commit": commit} for row in rows]
    if not options.no_write:
        shape = {"ranks": RANKS, "tokens_per_rank": options.tokens, "heads": HEADS, "head_dim": DIM, "dtype": "bf16"}
        file = harness.RESULTS / "links.json"
        earlier = json.loads(file.read_text()) if file.exists() else {"shape": shape, "rows": [], "growth": []}
        if earlier["shape"] == shape:  # what was not measured this time is kept
            again = set(map(place, rows))
            rows += [row for row in earlier["rows"] if place(row) not in again]
            growth = growth or earlier["growth"]
        harness.write("links", {"shape": shape, "rows": rows, "growth": growth})
        plot(sorted(rows, key=place), growth)
    return 0


def measure(network: Network, options: argparse.Namespace, ratios: list[float]) -> list[dict[str, Any]]:
    transfer = 2 * UNIT * options.tokens * 8 / (network.rate_mbit * 1e6)  # of a step of Ring's forward
    pairs = options.tokens**2 * HEADS
    rows: list[dict[str, Any]] = []
    for contender in CONTENDERS:
        wrong = max(network(error, contender, 64))
        if wrong > 0.02:
            raise SystemExit(f"{contender} is wrong by {wrong:.1%}: nothing was timed")
        for passes in PASSES:
            for ratio in ratios:
                arguments = contender, options.tokens, passes != "forward", ratio * transfer / pairs, options.rounds
                found = network(exposed, *arguments)
                row = {"topology": network.topology, "rate_mbit": network.rate_mbit, "contender": contender, "pass": passes}
                rows.append(row | {"ratio": ratio} | found[0] | {"bytes": max(x["bytes"] for x in found)})
                print(
                    f"{network.topology:7}{network.rate_mbit:5} Mbit/s {contender:26}{passes:19} compute {ratio:3}: "
                    f"{found[0]['total'] * 1e3:6.0f} ms, without communication {found[0]['without_communication'] * 1e3:6.0f}, "
                    f"communication alone {found[0]['communication'] * 1e3:6.0f}, exposed {found[0]['fraction']:6.1%}, "
                    f"{rows[-1]['bytes'] / 2**20:6.1f} MiB",
                    flush=True,
                )
    return rows


def grown(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward's communication behind a switch, with as many tokens a rank on 2, 4 and 8 ranks."""
    rows = []
    for ranks in (2, 4, 8):
        with Network("switch", ranks, min(options.rates)) as network:
            for contender in ("ring", "ulysses, 1 head group"):
                seconds = max(network(communication, contender, options.tokens, options.rounds))
                rows.append({"ranks": ranks, "rate_mbit": min(options.rates), "contender": contender, "seconds": seconds})
                print(f"{ranks} ranks, {options.tokens * ranks} tokens, {contender}: {seconds * 1e3:.0f} ms", flush=True)
    return rows


def place(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["topology"], row["rate_mbit"], row["ratio"]


def plot(rows: list[dict[str, Any]], growth: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys(map(place, rows)))
    figure, axes = pyplot.subplots(3, 1, figsize=(12, 12), layout="constrained")
    for axis, passes in zip(axes, PASSES, strict=False):
        for i, contender in enumerate(CONTENDERS):
            chosen = [row for row in rows if row["contender"] == contender and row["pass"] == passes]
            at = [places.index(place(row)) + i * 0.12 for row in chosen]
            bars = axis.bar(at, [row["total"] * 1e3 for row in chosen], 0.11, label=contender)
            axis.bar_label(bars, [f"{max(row['fraction'], 0):.0%}" for row in chosen], fontsize=6)
        names = [f"{topology}, {rate} Mbit/s,\ncompute {ratio} of Ring's transfer" for topology, rate, ratio in places]
        axis.set_xticks([x + 0.36 for x in range(len(places))], names, fontsize=8)
        axis.set_ylabel(f"{passes}, ms (label: exposed)")
    axes[0].legend(fontsize=7, ncols=4, loc="upper left")
    axes[0].margins(y=0.3)
    for contender in dict.fromkeys(row["contender"] for row in growth):
        chosen = [row for row in growth if row["contender"] == contender]
        axes[2].plot([row["ranks"] for row in chosen], [row["seconds"] * 1e3 for row in chosen], "o-", label=contender)
    axes[2].set_xlabel("ranks behind a switch, as many tokens on each")
    axes[2].set_ylabel("communication of forward + backward, ms")
    axes[2].set_ylim(0)
    axes[2].legend(fontsize=8)
    figure.savefig(harness.RESULTS / "links.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
