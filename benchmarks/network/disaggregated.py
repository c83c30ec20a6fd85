"""Time steps of attention over uneven documents, by tasks and by other strategies.

Documents have the published lengths of Pretrain, scaled to the context. 2 ranks really compute, on
one core each. More ranks than cores cannot compute simultaneously, so on 4 ranks computes are
sleeps, with the time per query-key pair that 1 core takes here. A step is forward and backward of
one call. Tasks are planned for these links. Each round interleaves the contenders. Results are
checked first.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar
from benchmarks import RESULTS, harness
from benchmarks.balance.documents import draw
from benchmarks.network.emulated import Network
from seqpar import Layout, balance
from seqpar.core.hooks import hooks
from seqpar.costs.profile import machine
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.tasks import TaskRectangles

HEADS, KV_HEADS, DIM = 8, 2, 64
BACKWARD = 2.5  # time over forward's, on ranks that really compute
CONTENDERS: dict[str, tuple[str, str]] = {  # strategy, and layout of the documents
    "fixed packing, ring": ("ring", "contiguous"),
    "zigzag ring": ("ring", "zigzag"),
    "zigzag all_gather": ("all_gather", "zigzag"),
    "ulysses": ("ulysses", "contiguous"),
    "disaggregated": ("disaggregated", "contiguous"),
    "disaggregated, zigzag": ("disaggregated", "zigzag"),
    "disaggregated, homes placed": ("disaggregated", "placed"),
}
NAME = "network-disaggregated"  # of the result files
Row = dict[str, Any]


@functools.cache
def layout_of(place: str, lengths: tuple[int, ...], ranks: int) -> Layout:
    """Return a layout of documents of these lengths."""
    if place == "placed":
        row_bytes = balance.RowBytes.of(HEADS, KV_HEADS, DIM, itemsize=4)
        return balance.place_homes(lengths, ranks, row_bytes=row_bytes)
    cu_seqlens = [0, *map(int, torch.tensor(lengths).cumsum(0))]
    return getattr(Layout, place)(cu_seqlens, ranks)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Priced:
    """A plan for links with the price of a byte in pairs, and the time of backward in forwards."""

    price: float
    backward: float

    def __call__(self, queries: Geometry, keys: Geometry, mask: Mask) -> TaskRectangles:
        sizes = {"itemsize": 4, "backward": self.backward}
        row_bytes = balance.RowBytes.sent(HEADS, KV_HEADS, DIM, **sizes)
        return balance.disaggregate(queries, mask, row_bytes=row_bytes, price=self.price)


@functools.cache
def module(strategy: str) -> Any:
    """Return a strategy's module on all ranks."""
    options = {"plan": Priced(*_price)} if strategy == "disaggregated" else {}
    return seqpar.make_attention(strategy, dist.group.WORLD, **options)


_price = [0.0, 1.0]  # of a byte on this process's links, and of a backward in forwards


def set_price(price: float, backward: float) -> None:
    """Set the prices of a byte and of backward, before the first module is made."""
    _price[:] = price, backward


@functools.cache
def operands(layout: Layout) -> list[Tensor]:
    """Return q, k, v and dout of this rank."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(layout.tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [layout.shard(x, dist.get_rank()) for x in whole]


def step(contender: str, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return out and the gradients of q, k and v, of a call."""
    strategy, place = CONTENDERS[contender]
    layout = layout_of(place, lengths, dist.get_world_size())
    *leaves, dout = operands(layout)
    leaves = [x.requires_grad_() for x in leaves]
    out = module(strategy)(*leaves, layout, causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def error(contender: str, lengths: tuple[int, ...]) -> float:
    """Return the largest RMS difference from zigzag Ring's results, over their RMS."""
    found = []
    for name in (contender, "zigzag ring"):
        layout = layout_of(CONTENDERS[name][1], lengths, dist.get_world_size())
        found.append([layout.unshard(x, dist.group.WORLD) for x in step(name, lengths)])
    return harness.worst_error(*found)


def slept(pair_seconds: float | None) -> Any:
    """Return a context that replaces computes by sleeps, if `pair_seconds` is given."""
    if pair_seconds is None:
        return nullcontext()
    return hooks.set(replace_compute=lambda area: time.sleep(area * pair_seconds))


def timed(
    contenders: Sequence[str], lengths: tuple[int, ...], rounds: int, pair_seconds: float | None
) -> dict[str, list[float]]:
    """Return this rank's seconds of a step of each contender, round by round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with slept(pair_seconds):
        for _ in range(rounds + 1):  # the first round makes plans and connections
            for name in contenders:
                dist.barrier()
                start = time.perf_counter()
                step(name, lengths)
                times[name].append(time.perf_counter() - start)
    return {name: found[1:] for name, found in times.items()}


def exposed(
    contender: str, lengths: tuple[int, ...], rounds: int, pair_seconds: float | None
) -> dict[str, Any]:
    """Return the exposed share of a step's communication, and the bytes that this rank sends."""
    return harness.exposed(
        lambda: step(contender, lengths),
        dist.group.WORLD,
        lambda: int(module(CONTENDERS[contender][0]).sent_bytes),
        rounds,
        pair_seconds,
    )


def seconds_of_a_pair() -> float:
    """Return the seconds of 1 core per pair and head, the mean of forward and backward."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, HEADS, 2048, DIM))
    best = float("inf")
    with machine.one_thread():
        for _ in range(3):
            start = time.perf_counter()
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), out)
            best = min(best, time.perf_counter() - start)
    return best / 2 / (HEADS * 2048 * 2049 / 2)


def measure(network: Network, options: argparse.Namespace, pair: float) -> list[Row]:
    """Return a row for each contender, with these seconds of 1 core per pair and head."""
    pair_seconds = None if network.ranks == 2 else pair
    if network.rate_mbit:
        backward = BACKWARD if pair_seconds is None else 1.0
        network(set_price, 8 / (network.rate_mbit * 1e6) / (pair * HEADS), backward)
    lengths = tuple(draw("pretrain", options.tokens, options.context, seed=options.seed).tolist())
    for contender in CONTENDERS:
        wrong = max(network(error, contender, lengths))
        if wrong > 1e-5:
            raise SystemExit(f"{contender} has an error of {wrong:.1e}: no times were measured")
    ranks = network(timed, [*CONTENDERS], lengths, options.rounds, pair_seconds)
    rows: list[Row] = []
    for contender in CONTENDERS:
        rounds = zip(*(of_rank[contender] for of_rank in ranks), strict=True)
        seconds = [max(times) for times in rounds]
        found = network(exposed, contender, lengths, options.rounds, pair_seconds)
        row = {"ranks": network.ranks, "rate_mbit": network.rate_mbit, "contender": contender}
        row |= {"seconds": statistics.median(seconds), "rounds": seconds, "sleeps": pair_seconds}
        row |= {"documents": len(lengths), "fraction": found[0]["fraction"]}
        rows.append(row | {"bytes": max(x["bytes"] for x in found), "exposure": found[0]})
    ring = next(row["seconds"] for row in rows if row["contender"] == "zigzag ring")
    for row in rows:
        row["speed"] = ring / row["seconds"]
        print(
            f"{row['ranks']} ranks, {row['rate_mbit']:5} Mbit/s, {row['contender']:28}"
            f"{row['seconds'] * 1e3:7.0f} ms, {row['speed']:.2f} times zigzag ring's speed, "
            f"{row['fraction']:4.0%} exposed, {row['bytes'] / 2**20:6.1f} MiB",
            flush=True,
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return a table of each contender's steps."""
    head = ["ranks", "Mbit/s", "contender", "ms", "speed, zigzag Ring = 1", "exposed", "MiB sent"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["ranks"], row["rate_mbit"], row["contender"], f"{row['seconds'] * 1e3:.0f}"]
        cells += [f"{row['speed']:.2f}", f"{row['fraction']:.0%}", f"{row['bytes'] / 2**20:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Measure the selected settings, print them, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of all ranks")
    parser.add_argument("--context", type=int, default=8192, help="the longest document")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--rates", type=int, nargs="*", default=[200, 1000], help="Mbit/s")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--topology", default="switch", choices=["switch", "mesh", "loopback"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="only print: write no result files")
    options = parser.parse_args()
    before, rows, pair = harness.canary(), list[Row](), seconds_of_a_pair()
    for ranks in options.ranks:
        for rate in options.rates:
            with Network(options.topology, ranks, rate) as network:
                rows += measure(network, options, pair)
    drift = harness.check_canary(before, harness.canary())
    if not options.no_write:
        shape = {"tokens": options.tokens, "context": options.context, "heads": HEADS}
        shape |= {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "fp32", "seed": options.seed}
        found = {"shape": shape, "topology": options.topology, "canary_drift": drift, "rows": rows}
        path = harness.write(RESULTS, NAME, found)
        plot(rows, path.with_suffix(".png"))
    return 0


def plot(rows: list[Row], path: Path) -> None:
    """Draw each contender's seconds, one group per place."""
    places = list(dict.fromkeys((row["ranks"], row["rate_mbit"]) for row in rows))
    figure, axis = harness.pyplot().subplots(figsize=(10, 5), layout="constrained")
    for i, contender in enumerate(CONTENDERS):
        chosen = [row for row in rows if row["contender"] == contender]
        at = [places.index((row["ranks"], row["rate_mbit"])) + i * 0.12 for row in chosen]
        bars = axis.bar(at, [row["seconds"] * 1e3 for row in chosen], 0.11, label=contender)
        axis.bar_label(bars, [f"{row['speed']:.2f}" for row in chosen], fontsize=6)
    names = [f"{ranks} ranks, {rate} Mbit/s" for ranks, rate in places]
    axis.set_xticks([x + 0.35 for x in range(len(places))], names)
    axis.set_ylabel("forward + backward, ms (label: speed over zigzag ring)")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
