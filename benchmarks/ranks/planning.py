"""Measure the time and memory in which one rank plans the first call of a layout.

A packed batch has a new layout in every step, so each step pays for planning once. One rank of many
plans a causal call: `traffic` lists its messages, and `plan` is all planning of the first call
before it posts messages. Nothing is sent. Layouts are made beforehand. Each figure is a median over
rounds, in milliseconds of the process's CPU time, because other programs share the machine's cores.
Peak memory is the memory that Python and NumPy allocate in addition to the layout. The messages are
checked against the tables of pairs of ranks, for some peers.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from argparse import Namespace
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from seqpar import Layout, make_attention
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from seqpar.simulate import Comm

CASES = [
    ("zigzag", 64, 64),
    ("zigzag", 512, 512),
    ("zigzag", 2048, 2048),
    ("zigzag", 4096, 8000),
    ("min_chunk=128", 512, 512),
    ("min_chunk=128", 4096, 8000),
    ("spans of a plan", 512, 512),
    ("spans of a plan", 4096, 8000),
]
KV_HEADS, HEAD_DIM = 8, 128
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # of k and v, in bf16


def documents(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return cu_seqlens of documents of log-normal lengths, of up to 2^20 tokens."""
    lengths = np.random.default_rng(seed).lognormal(8.5, 1.2, count).astype(np.int64)
    return np.r_[0, np.cumsum(np.clip(lengths, 64, 2**20))]


def layout_of(kind: str, ranks: int, count: int, seed: int) -> Layout:
    cu = documents(count, seed)
    if kind == "zigzag":
        return Layout.zigzag(cu, ranks)
    if kind.startswith("min_chunk"):
        return Layout.zigzag(cu, ranks, min_chunk=128)
    contiguous = Layout.contiguous(cu, ranks)
    return Layout.from_spans([contiguous.spans(rank) for rank in range(ranks)], cu)


def check(rows: list[Any], layout: Layout, rank: int) -> None:
    """Raise a SystemExit if the bytes of some messages are not those of tables of pairs."""
    sent = {row.peer: row.bytes for row in rows if row.direction == "forward"}
    geometry, mask = layout.geometry, Mask(UNLIMITED, 0)
    peers = {(rank + step) % layout.ranks for step in (1, 2, layout.ranks // 2, layout.ranks - 1)}
    for peer in peers - {rank}:
        expected = slices_between(geometry, peer, geometry, rank, mask).key_rows * ROW_BYTES
        if sent.get(peer, 0) != expected:
            raise SystemExit(
                f"rank {rank} sends {sent.get(peer, 0)} bytes to {peer}, not {expected}"
            )


def messages(layout: Layout) -> list[Any]:
    return module(layout).traffic(*operands(layout), layout, causal=True)


def plan(layout: Layout) -> None:
    """Plan a call, as the first call of a layout does."""
    attn = module(layout)
    attn._bound.strategy.plan(attn._resolve(*operands(layout), layout, causal=True))


def module(layout: Layout) -> Any:
    return make_attention("ring", Comm("planning", layout.ranks // 3, layout.ranks))


def operands(layout: Layout) -> list[torch.Tensor]:
    """Return q, k and v of the rank, without data."""
    tokens = layout.tokens_on(layout.ranks // 3)
    heads = 4 * KV_HEADS, KV_HEADS, KV_HEADS
    return [torch.empty(tokens, n, HEAD_DIM, dtype=torch.bfloat16, device="meta") for n in heads]


def row_of(kind: str, ranks: int, count: int, rounds: int) -> dict[str, Any]:
    """Return a row of the results; each sample has a new layout, so that no cache has its plan."""
    seeds = iter(range(4 * rounds + 1))
    layout = layout_of(kind, ranks, count, next(seeds))
    check(messages(layout), layout, ranks // 3)
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, function in (("traffic", messages), ("plan", plan)):
            layout = layout_of(kind, ranks, count, next(seeds))
            gc.collect()  # of earlier rounds
            start = time.process_time()
            function(layout)
            milliseconds = 1e3 * (time.process_time() - start)
            samples.setdefault(name, []).append(milliseconds)
            layout = layout_of(kind, ranks, count, next(seeds))
            tracemalloc.start()
            function(layout)
            peak = tracemalloc.get_traced_memory()[1] / 2**20
            tracemalloc.stop()
            samples.setdefault(f"{name} MiB", []).append(peak)
    return {
        "layout": kind,
        "ranks": ranks,
        "documents": count,
        "medians": {name: statistics.median(values) for name, values in samples.items()},
        "samples": samples,
    }


def measure(options: Namespace) -> dict[str, Any]:
    head = ["layout", "ranks", "documents", "traffic, ms", "MiB", "plan, ms", "MiB"]
    rows = [row_of(*case, options.rounds) for case in CASES]
    names = ("traffic", "traffic MiB", "plan", "plan MiB")
    cells = [
        [*map(str, case), *(f"{row['medians'][name]:.1f}" for name in names)]
        for case, row in zip(CASES, rows, strict=True)
    ]
    print(harness.table(head, cells))
    return {"rounds": options.rounds, "rows": rows}


if __name__ == "__main__":
    harness.run("planning", __doc__, {"--rounds": 7}, measure, canary_is="none")
