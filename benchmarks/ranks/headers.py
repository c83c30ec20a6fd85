"""Measure the cost of the digest of a call's arguments in its headers.

Two gloo ranks of one thread make calls of a small batch. Calls with and without the digest
alternate, from the second call of a layout on. Times are CPU times of each rank's main thread: the
host's work without its waits. Figures are medians in microseconds, and their ratios. Headers have
the same size with and without the digest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks import RESULTS, harness
from seqpar import LASP2Attention, Layout, RecurrentAttention, causal_conv1d, make_attention
from seqpar.comm.messages import header
from seqpar.comm.messages.exchange import Comm

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 2, 256, 8, 4, 16
CASES = "ring", "all_gather", "ulysses", "ring with sinks", "decode", "lasp2", "recurrent", "conv1d"


def call_of(name: str, rank: int) -> Callable[[], Any]:
    """Return a function that makes a call of a case, and its backward."""
    group, layout = dist.group.WORLD, Layout.zigzag(TOKENS, RANKS)
    tokens = layout.tokens_on(rank)
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, n, DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
    if name == "conv1d":
        x, weight = torch.randn(tokens, DIM, requires_grad=True), torch.randn(DIM, 4)
        return lambda: causal_conv1d(x, weight, layout, group).sum().backward()
    if name == "lasp2":
        lasp2, decay = LASP2Attention(group), -torch.rand(KV_HEADS)
        return lambda: lasp2(q, k, v, layout, log_decay=decay).sum().backward()
    if name == "recurrent":
        recurrent, gates = RecurrentAttention(group, "scalar_decay"), -torch.rand(tokens, KV_HEADS)
        return lambda: recurrent(q, k, v, layout, log_decay=gates).sum().backward()
    if name == "decode":
        attn, query = make_attention("ring", group), torch.randn(1, HEADS, DIM)
        keys = k.detach(), v.detach()
        return lambda: attn.decode(query, *keys, layout)
    attn = make_attention(name.split()[0], group)
    sinks = torch.zeros(HEADS) if "sinks" in name else None
    return lambda: attn(q, k, v, layout, causal=True, sinks=sinks).sum().backward()


def no_headers(comm: Comm, device: torch.device) -> bool:
    """Replace `Comm.has_headers`. A Mock would take longer than the digest."""
    return False


def run(rank: int, store: str, calls: int, rows: SimpleQueue[dict[str, Any]]) -> None:
    """Run a rank, and time all cases; rank 0 puts a row for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    without = mock.patch.object(Comm, "has_headers", no_headers)
    for name in CASES:
        call, times = call_of(name, rank), ([], [])
        for i in range(2 * calls + 8):
            if i % 2:
                without.start()
            start = time.thread_time_ns()
            call()
            if i >= 8:
                times[i % 2].append((time.thread_time_ns() - start) / 1e3)
            if i % 2:
                without.stop()
        ours, bare = map(statistics.median, times)
        if not rank:
            rows.put({"case": name, "with": ours, "without": bare, "ratio": ours / bare})
    dist.destroy_process_group()


def main() -> int:
    """Time both ranks, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--calls", type=int, default=300, help="calls of each case, with and without the digest"
    )
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    before = harness.canary()
    with tempfile.TemporaryDirectory() as folder:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(run, (f"{folder}/store", options.calls, queue), nprocs=RANKS)
        rows = [queue.get() for _ in CASES]
    drift = harness.check_canary(before, harness.canary())
    print("| call | µs with | µs without | ratio |\n|---|---|---|---|")
    for row in rows:
        figures = f"{row['with']:.0f} | {row['without']:.0f} | {row['ratio']:.3f}"
        print(f"| {row['case']} | {figures} |")
    if not options.no_write:
        sizes = {"header_bytes": header._HEADER_BYTES, "digest_bytes": header.DIGEST_BYTES}
        harness.write(RESULTS, "headers", {**sizes, "canary_drift": drift, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
