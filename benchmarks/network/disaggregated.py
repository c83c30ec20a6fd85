"""Time steps of attention over uneven documents, by tasks and by other strategies.

Documents have the published lengths of Pretrain, scaled to the context. 2 ranks really compute, on
one core each. More ranks than cores cannot compute simultaneously, so on 4 ranks computes are
sleeps, with the time per query-key pair that 1 core takes here. A step is forward and backward of
one call. Tasks are planned for these links. Each round interleaves the contenders. Results are
checked first.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.balance.documents import draw
from benchmarks.network.emulated import Network
from benchmarks.steps import Step, module
from seqpar import Layout, balance
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
CHECKED = 32  # the part of the documents' lengths that is compared with fp64
Row = dict[str, Any]


@functools.cache
def layout_of(place: str, lengths: tuple[int, ...], ranks: int) -> Layout:
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


def attention(strategy: str) -> Any:
    """Return a strategy's module on all ranks."""
    options = {"plan": Priced(*_price)} if strategy == "disaggregated" else {}
    return module(strategy, **options)


_price = [0.0, 1.0]  # of a byte on this process's links, and of a backward in forwards


def set_price(price: float, backward: float) -> None:
    """Set the prices of a byte and of backward, before the first module is made."""
    _price[:] = price, backward


@functools.cache
def step(place: str, lengths: tuple[int, ...]) -> Step:
    """Return a step on documents of these lengths."""
    return Step(layout_of(place, lengths, dist.get_world_size()), HEADS, DIM, KV_HEADS)


def error(contender: str, lengths: tuple[int, ...]) -> float:
    strategy, place = CONTENDERS[contender]
    return step(place, lengths).error(attention(strategy))


def timed(contender: str, lengths: tuple[int, ...], pair_seconds: float | None) -> float:
    strategy, place = CONTENDERS[contender]
    with harness.sleeping(pair_seconds):
        return step(place, lengths).seconds(attention(strategy))


def exposed(
    contender: str, lengths: tuple[int, ...], rounds: int, pair_seconds: float | None
) -> dict[str, Any]:
    """Return the exposed share of a step's communication, and the bytes that this rank sends."""
    strategy, place = CONTENDERS[contender]
    return step(place, lengths).exposed(attention(strategy), rounds, pair_seconds)


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


def measured(network: Network, options: Namespace, pair: float) -> list[Row]:
    """Return a row for each contender, with these seconds of 1 core per pair and head."""
    pair_seconds = None if network.ranks == 2 else pair
    if network.rate_mbit:
        backward = BACKWARD if pair_seconds is None else 1.0
        network(set_price, 8 / (network.rate_mbit * 1e6) / (pair * HEADS), backward)
    lengths = tuple(draw("pretrain", options.tokens, options.context, seed=options.seed).tolist())
    short = tuple(-(-x // CHECKED) for x in lengths)
    for contender in CONTENDERS:
        harness.check_error(contender, max(network(error, contender, short)), 1e-5)
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for i, contender in harness.turns(CONTENDERS, options.rounds + 1):
        seconds = max(network(timed, contender, lengths, pair_seconds))
        if i:  # the first round makes plans and connections
            times[contender].append(seconds)
    rows: list[Row] = []
    for contender, seconds in times.items():
        found = network(exposed, contender, lengths, options.rounds, pair_seconds)
        row = {"ranks": network.ranks, "rate_mbit": network.rate_mbit, "contender": contender}
        row |= {"seconds": statistics.median(seconds), "rounds": seconds, "sleeps": pair_seconds}
        row |= {"documents": len(lengths), "fraction": found[0]["fraction"]}
        rows.append(row | {"bytes": max(x["bytes"] for x in found), "exposure": found[0]})
    ring = next(row["seconds"] for row in rows if row["contender"] == "zigzag ring")
    rows = [row | {"speed": ring / row["seconds"]} for row in rows]
    print(table(rows), flush=True)
    return rows


def table(rows: list[Row]) -> str:
    head = [
        "ranks",
        "Mbit/s",
        "contender",
        "ms",
        "speed relative to zigzag Ring",
        "exposed",
        "MiB sent",
    ]
    cells = []
    for row in rows:
        times = f"{row['seconds'] * 1e3:.0f}", f"{row['speed']:.2f}", f"{row['fraction']:.0%}"
        place = str(row["ranks"]), str(row["rate_mbit"]), row["contender"]
        cells.append([*place, *times, f"{row['bytes'] / 2**20:.1f}"])
    return harness.table(head, cells)


def measure(options: Namespace) -> dict[str, Any]:
    rows, pair = list[Row](), seconds_of_a_pair()
    for ranks, rate in itertools.product(options.ranks, options.rates):
        with Network(options.topology, ranks, rate) as network:
            rows += measured(network, options, pair)
    shape = {"tokens": options.tokens, "context": options.context, "heads": HEADS}
    shape |= {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "fp32", "seed": options.seed}
    return {"shape": shape, "topology": options.topology, "rows": rows}


ARGUMENTS = {
    "--tokens": (16384, "tokens of all ranks"),
    "--context": (8192, "the longest document"),
    "--seed": (0, "seed of the lengths"),
    "--rates": ([200, 1000], "Mbit/s"),
    "--ranks": [2, 4],
    "--topology": ("switch", None, ["switch", "mesh", "loopback"]),
    "--rounds": 5,
}

if __name__ == "__main__":
    harness.run("network-disaggregated", __doc__, ARGUMENTS, measure)
