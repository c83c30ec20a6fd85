"""Measure the time to build the kernels' tables, and their bytes on the device.

A packed batch has a new layout in every step, and its first call builds the tables of forward and
backward. They are built here on the CPU, with the configurations for Hopper, bf16 and head dim 128.
The same process also builds the tables of an older commit; the two alternate. Each sample has a new
layout, so that nothing of it is cached. Figures are medians over rounds, in milliseconds of the
process's CPU time, because other programs share the machine's cores.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from seqpar.kernels import flash_attention

from benchmarks import harness
from benchmarks.ranks.overhead import sources_at
from seqpar import Layout
from seqpar.layout.masks.mask import Mask, Slices, slices_between, slices_over

BEFORE = "3e29990"  # the last commit in which each tile had its own list of full blocks
RANK, RANKS = 3, 8
DEVICE = torch.device("cpu")
LARGEST_BEFORE = 2**18  # keys; tables of that commit take a minute for 2^20


def one_document(tokens: int, prefix: int | None = None) -> list[Slices]:
    geometry = Layout.contiguous([0, tokens], 1).geometry
    prefixes = None if prefix is None else np.array([prefix])
    return [slices_between(geometry, 0, geometry, 0, Mask.of(True, (-1, -1), prefixes, geometry))]


def documents(tokens: int, count: int, seed: int, window: int = -1) -> list[Slices]:
    """Return the slices of a pack on one rank, with log-normal lengths of documents."""
    geometry = Layout.contiguous(edges(tokens, count, seed), 1).geometry
    mask = Mask.of(True, (window, 0) if window > 0 else (-1, -1), None, geometry)
    return [slices_between(geometry, 0, geometry, 0, mask)]


def ring(tokens: int, count: int, seed: int) -> list[Slices]:
    """Return the slices of each hop of Ring, on one rank."""
    geometry = Layout.zigzag(edges(tokens, count, seed), RANKS).geometry
    mask = Mask.of(True, (-1, -1), None, geometry)
    peers = [(RANK - hop) % RANKS for hop in range(RANKS)]
    return [slices_between(geometry, RANK, geometry, peer, mask) for peer in peers]


def all_gather(tokens: int) -> list[Slices]:
    """Return the slices over own keys, and over the keys of all other ranks."""
    geometry = Layout.zigzag([0, tokens], RANKS).geometry
    mask = Mask.of(True, (-1, -1), None, geometry)
    others = tuple((RANK - hop) % RANKS for hop in range(1, RANKS))
    own = slices_between(geometry, RANK, geometry, RANK, mask)
    return [own, slices_over(geometry, RANK, geometry, others, mask)]


def edges(tokens: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return cu_seqlens of documents of log-normal lengths, a multiple of 16 each."""
    lengths = np.random.default_rng(seed).lognormal(0, 1, count)
    inner = np.cumsum(lengths)[:-1] / lengths.sum() * tokens
    return np.r_[0, np.unique(inner.astype(np.int64) // 16 * 16), tokens]


CASES: dict[str, Callable[[int], list[Slices]]] = {  # of a seed
    "causal, 256K tokens": lambda _: one_document(2**18),
    "causal, 512K tokens": lambda _: one_document(2**19),
    "causal, 1M tokens": lambda _: one_document(2**20),
    "causal with a prefix of 1,000, 1M tokens": lambda _: one_document(2**20, 1000),
    "AllGather on 8 ranks, zigzag, 1M tokens": lambda _: all_gather(2**20),
    "32 documents, 128K tokens": lambda seed: documents(2**17, 32, seed),
    "64 documents, window 1,024, 128K tokens": lambda seed: documents(2**17, 64, seed, 1023),
    "Ring on 8 ranks, zigzag, 32 documents, 128K tokens": lambda seed: ring(2**17, 32, seed),
}


def kernels_at(commit: str, folder: Path) -> ModuleType:
    """Return the flash-attention kernels of a commit, as a package of another name."""
    (sources_at(commit, folder) / "triton_kernels").rename(folder / "kernels_before")
    sys.path.insert(0, str(folder))
    return importlib.import_module("kernels_before.flash_attention")


def build(kernels: ModuleType, hops: Sequence[Slices]) -> list[Any]:
    """Return all launches of forward and backward."""
    table: Any = kernels.configs.TABLE["sm_90", "half", 128]
    launches = list(kernels.forward_launches(hops, table.forward, DEVICE))
    for slices in hops:
        launches.append(kernels.backward_launches(slices, table.backward_kv, DEVICE, True))
        launches.append(kernels.backward_launches(slices, table.backward_q, DEVICE, False))
    return [launch for of_hop in launches for launch in of_hop]


def device_bytes(launches: Sequence[Any]) -> int:
    """Return the bytes of all tables; launches may share some."""
    storages = [x.untyped_storage() for launch in launches for x in launch.arrays]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def row_of(name: str, contenders: dict[str, ModuleType], rounds: int) -> dict[str, Any]:
    """Return a row of the results."""
    case = CASES[name]
    if max(slices.key_rows for slices in case(0)) > LARGEST_BEFORE:
        contenders = {"now": contenders["now"]}
    samples: dict[str, list[float]] = {contender: [] for contender in contenders}
    sizes: dict[str, int] = {}
    for seed in range(rounds + 1):  # the first round warms up
        for contender, kernels in list(contenders.items())[:: 1 if seed % 2 else -1]:
            hops = case(seed)
            gc.collect()  # of earlier rounds
            start = time.process_time()
            launches = build(kernels, hops)
            seconds = time.process_time() - start
            if seed:
                samples[contender].append(1e3 * seconds)
            sizes[contender] = device_bytes(launches)
    medians = {contender: statistics.median(x) for contender, x in samples.items()}
    return {"case": name, "bytes": sizes, "medians": medians, "samples": samples}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/benchmarks/kernels.md."""
    lines = []
    for row in rows:
        sizes, medians = row["bytes"], row["medians"]
        cells = [f"{sizes['now'] / 1e6:.1f}", "", f"{medians['now']:.1f}", ""]
        if "before" in sizes:
            cells[1], cells[3] = f"{sizes['before'] / 1e6:,.1f}", f"{medians['before']:,.1f}"
        lines.append([row["case"], *cells])
    head = ["tables of forward and backward", "MB", "before", "ms", "before"]
    return harness.table(head, lines)


def measure(options: Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        before = kernels_at(options.before, Path(folder))
        contenders = {"now": flash_attention, "before": before}
        rows = [row_of(name, contenders, options.rounds) for name in CASES]
    print(table(rows))
    return {"before": options.before, "rounds": options.rounds, "rows": rows}


if __name__ == "__main__":
    arguments = {"--rounds": 11, "--before": (BEFORE, "the older commit")}
    harness.run("kernel-tables", __doc__, arguments, measure, canary_is="none")
