"""Run 10,000 steps of changing strategies, layouts and documents on 4 ranks: does anything grow?

Each step draws a strategy, a kind of layout, documents and a mask from the step's number, and runs
forward and backward on 4 gloo ranks of one thread. Results of every 20th step are compared with
fp64 attention in one process. Every 100 steps each rank notes its resident memory, threads, open
files, Python objects, and the CPU time of a step. The program exits with 1 if one of these grows:
if its median over the last quarter of the steps is above the median over the second quarter by more
than the stated share.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness
from benchmarks.network.emulated import Network
from seqpar import LASP2Attention, Layout, RecurrentAttention, make_attention
from seqpar.comm.messages.comm import Comm

RANKS, HEADS, DIM, MAX_TOKENS = 4, 4, 8, 512
SOFTMAX = "ring", "all_gather", "ulysses", "token_ring", "disaggregated", "mesh", "usp"
LINEAR = "lasp2", "recurrent"
LAYOUTS = "zigzag", "contiguous", "striped"
LARGEST_ERROR = 1e-5  # of out in fp32, RMS over RMS
CHECKED, NOTED = 20, 100  # steps between two comparisons, and between two notes
GROWTH = {
    "memory_mib": 0.03,
    "threads": 0.0,
    "files": 0.0,
    "objects": 0.03,
    "cpu_ms": 0.1,
}  # shares


def modules() -> dict[str, Any]:
    """Return one module per strategy, as a model has them."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2, 2))
    softmax = {
        name: make_attention(name, mesh if name in ("mesh", "usp") else group) for name in SOFTMAX
    }
    linear = {"lasp2": LASP2Attention(group), "recurrent": RecurrentAttention(group, "linear")}
    return softmax | linear


def dense(q: Tensor, k: Tensor, v: Tensor, cu: list[int], linear: bool, causal: bool) -> Tensor:
    """Return attention (T, H, D) over whole documents, in fp64."""
    outs = []
    for start, stop in itertools.pairwise(cu):
        query, key, value = (x[start:stop].double().transpose(0, 1) for x in (q, k, v))
        scores = query @ key.transpose(1, 2) * DIM**-0.5
        hidden = torch.ones(scores.shape[1:]).triu(1).bool() & causal
        if linear:
            weights = scores.masked_fill(hidden, 0)
        else:
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append((weights @ value).transpose(0, 1))
    return torch.cat(outs)


def step(number: int, rank: int, made: dict[str, Any]) -> float:
    """Run a step; return the error of out on this rank, or 0 if it was not compared."""
    random = np.random.default_rng(number)
    name = str(random.choice(SOFTMAX + LINEAR))
    linear, kind = name in LINEAR, str(random.choice(LAYOUTS))
    causal = linear or bool(random.integers(2))
    lengths = random.lognormal(3.5, 1.2, random.integers(1, 9)).astype(int).clip(1, 128)
    cu = np.r_[0, np.cumsum(lengths)].clip(max=MAX_TOKENS).tolist()
    layout = getattr(Layout, "contiguous" if linear else kind)(cu, RANKS)
    generator = torch.Generator().manual_seed(number)
    whole = torch.randn(3, cu[-1], HEADS, DIM, generator=generator)
    q, k, v = (layout.shard(x, rank).requires_grad_() for x in whole)
    options = {"scale": DIM**-0.5} if linear else {"causal": causal}
    out = made[name](q, k, v, layout, **options)
    out.square().sum().backward()
    if number % CHECKED or not out.numel():
        return 0.0
    right = layout.shard(dense(*whole, cu, linear, causal), rank)
    return harness.worst_error([out.detach()], [right])


def note(number: int, cpu: list[float]) -> dict[str, float]:
    """Return the resources that this process uses now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "step": number,
        "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "cpu_ms": statistics.median(cpu),
    }


def run(steps: int, minutes: float) -> tuple[list[dict[str, float]], list[float], float]:
    """Run a rank's steps; return its notes, the time of each step, and the largest error."""
    made, comm, rank = modules(), Comm.of(dist.group.WORLD), dist.get_rank()
    notes, times, error, end = [], [], 0.0, time.monotonic() + 60 * minutes
    cpu: list[float] = []
    for number in range(1, steps + 1):
        start, used = time.perf_counter(), time.process_time()
        error = max(error, step(number, rank, made))
        if error > LARGEST_ERROR:
            raise SystemExit(f"step {number} has an error of {error:.1e}")
        times.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - used))
        if number % NOTED == 0:
            notes.append(note(number, cpu))
            cpu.clear()
            late = torch.tensor(float(time.monotonic() > end))
            if any(comm.all_gather(late, label="soak")):
                break
    return notes, times, error


def growth(notes: list[dict[str, float]], name: str) -> float:
    """Return by what share a figure's median grew from the second quarter to the last one."""
    figures = [each[name] for each in notes]
    quarter = len(figures) // 4
    before, after = figures[quarter : 2 * quarter], figures[-quarter:]
    return statistics.median(after) / statistics.median(before) - 1


def measure(options: Namespace) -> dict[str, Any]:
    with Network("loopback", RANKS, timeout=60 * options.minutes + 600) as network:
        found = network(run, options.steps, options.minutes)
    notes, times, error = [row[0] for row in found], found[0][1], max(row[2] for row in found)
    grown = {name: max(growth(each, name) for each in notes) for name in GROWTH}
    percentiles = {str(p): float(np.percentile(times, p)) for p in (1, 50, 90, 99, 99.9)}
    print(f"{len(times)} steps, error {error:.1e}, ms by percentile {percentiles}")
    for name, share in grown.items():
        print(f"{name}: {notes[0][0][name]:.1f} at first, {share:+.1%} from 2nd to last quarter")
    return {
        "steps": len(times),
        "worst_error": error,
        "growth": grown,
        "percentiles_ms": percentiles,
        "ranks": notes,
    }


ARGUMENTS = {
    "--steps": (10_000, "at most, and at least 400"),
    "--minutes": (600.0, "end earlier after this time"),
}

if __name__ == "__main__":
    grown = harness.run("soak", __doc__, ARGUMENTS, measure, canary_is="none")["growth"]
    sys.exit(int(any(share > GROWTH[name] for name, share in grown.items())))
