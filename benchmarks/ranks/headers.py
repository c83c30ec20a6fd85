"""Measure the cost of the digest of a call's arguments in its headers.

Two gloo ranks of one thread make calls of a small batch. Calls with and without the digest
alternate, from the second call of a layout on. Times are CPU times of each rank's main thread: the
host's work without its waits. Figures are medians in microseconds, and their ratios. Headers have
the same size with and without the digest.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.network.emulated import Network
from seqpar import LASP2Attention, Layout, RecurrentAttention, causal_conv1d, make_attention
from seqpar.comm.messages import message_header
from seqpar.comm.messages.comm import Comm

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


def timed(calls: int) -> list[dict[str, Any]]:
    """Return a row for each case, with this rank's times."""
    rows = []
    without = mock.patch.object(Comm, "has_headers", no_headers)
    for name in CASES:
        call, times = call_of(name, dist.get_rank()), ([], [])
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
        rows.append({"case": name, "with": ours, "without": bare, "ratio": ours / bare})
    return rows


def measure(options: Namespace) -> dict[str, Any]:
    with Network("loopback", RANKS, timeout=600) as network:
        rows, _ = network(timed, options.calls)
    cells = [
        [row["case"], f"{row['with']:.0f}", f"{row['without']:.0f}", f"{row['ratio']:.3f}"]
        for row in rows
    ]
    print(harness.table(["call", "µs with", "µs without", "ratio"], cells))
    sizes = {
        "header_bytes": message_header._HEADER_BYTES,
        "digest_bytes": message_header.DIGEST_BYTES,
    }
    return {**sizes, "rows": rows}


ARGUMENTS = {"--calls": (300, "calls of each case, with and without the digest")}

if __name__ == "__main__":
    harness.run("headers", __doc__, ARGUMENTS, measure)
