"""Compare the peak of memory of attention steps with their simulations.

Two ranks of this machine run forward and backward of a strategy. The measured peak is the most
resident memory during a step, minus the resident memory before it. The simulated peak is that of
`simulate.record`.
"""

from __future__ import annotations

import gc
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.network.emulated import Network
from benchmarks.simulate.rehearsal import MALLOC
from seqpar import Layout, make_attention, simulate

RANKS, DIM, HEADS = 2, 64, 8
SMALL = 512  # tokens of a first step, which imports and connects
GOAL = 0.05  # the largest error


class Setting(NamedTuple):
    strategy: str
    layout: str
    kv_heads: int
    dtype: str

    def made(self, tokens: int) -> Layout:
        return getattr(Layout, self.layout)([0, tokens], RANKS)

    def step(self, group: Any, layout: Layout, rank: int, device: str) -> None:
        """Run forward and backward of a rank, on tensors of ones or without data."""
        dtype, n = getattr(torch, self.dtype), layout.tokens_on(rank)
        q, k, v = (
            torch.ones(n, heads, DIM, dtype=dtype, device=device).requires_grad_()
            for heads in (HEADS, self.kv_heads, self.kv_heads)
        )
        out = make_attention(self.strategy, group)(q, k, v, layout, causal=True)
        out.backward(torch.ones_like(out))


SETTINGS = [
    Setting("ring", "zigzag", 8, "float32"),
    Setting("ring", "zigzag", 2, "float32"),
    Setting("ring", "zigzag", 8, "bfloat16"),
    Setting("all_gather", "zigzag", 8, "float32"),
    Setting("all_gather", "contiguous", 2, "bfloat16"),
    Setting("ulysses", "contiguous", 8, "float32"),
    Setting("ulysses", "contiguous", 2, "float32"),
    Setting("ulysses", "contiguous", 2, "bfloat16"),
    Setting("token_ring", "zigzag", 8, "float32"),
    Setting("disaggregated", "zigzag", 8, "float32"),
]


def measured(setting: Setting, tokens: int) -> int:
    """Return the bytes by which a step raises this rank's resident memory at its peak."""
    for size in (SMALL, tokens):
        setting.step(dist.group.WORLD, setting.made(size), dist.get_rank(), "cpu")
    gc.collect()
    dist.barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    setting.step(dist.group.WORLD, setting.made(tokens), dist.get_rank(), "cpu")
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(name))
    return 1024 * int(kilobytes)


def simulated(setting: Setting, tokens: int) -> int:
    layout = setting.made(tokens)
    programs = simulate.record(
        lambda comm: setting.step(comm, layout, comm.rank, "meta"), RANKS, ordered=False
    )
    return max(program.peak_bytes for program in programs)


def measure(options: Namespace) -> harness.Results:
    os.environ |= MALLOC
    rows = []
    with Network("loopback", RANKS, timeout=300) as network:
        for setting in SETTINGS:
            row = setting._asdict() | {
                "measured": max(network(measured, setting, options.tokens)),
                "simulated": simulated(setting, options.tokens),
            }
            rows.append(row | {"error": row["simulated"] / row["measured"] - 1})
    print(table(rows))
    errors = np.abs([row["error"] for row in rows])
    print(f"within {GOAL:.0%}: {(errors <= GOAL).sum()} of {len(rows)}")
    return {"tokens": options.tokens, "rows": rows, "within_goal": int((errors <= GOAL).sum())}


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            *(str(row[x]) for x in Setting._fields),
            *(f"{row[x] / 2**20:.0f}" for x in ("measured", "simulated")),
            f"{row['error']:+.1%}",
        ]
        for row in rows
    ]
    head = ["strategy", "layout", "KV heads", "dtype", "measured, MiB", "simulated, MiB", "error"]
    return harness.table(head, cells)


if __name__ == "__main__":
    harness.run(
        "peak-memory", __doc__, {"--tokens": (8192, "of all ranks")}, measure, canary_is="none"
    )
