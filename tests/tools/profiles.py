"""Profile a rank of every strategy: kernel launches, gaps between kernels, and memory.

`python -m tests.tools.profiles --folder FOLDER` calls each strategy on one rank of 8 with 16K
tokens, with one document and with 32 documents, and writes profiles.json after each strategy. No
messages are sent. Each message counts as received at once, and its memory keeps its old content. A
profile therefore has only the kernels of the rank and the work of the host that launches them. The
first call of a strategy compiles kernels. The second call is profiled, forward and backward.

Without a GPU, PyTorch's innermost operators are profiled in place of kernels, and no memory is
counted.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import RESULTS, harness
from benchmarks.kernels.device import DEVICE, GPU, refusal, usable
from seqpar import Layout
from tests.support.cases import STRATEGIES, module
from tests.support.steady import SilentComm

DTYPE = torch.bfloat16 if GPU else torch.float32
SHOWN = 10  # the number of kernels with the longest total time that are named per pass


def use(intervals):
    """Return the seconds for which a device works, and the seconds for which it waits between
    kernels.

    `intervals` has the (start, stop) of each kernel in µs. Kernels may overlap.
    """
    busy, gaps, until = 0.0, [], None
    for start, stop in sorted(intervals):
        if until is not None and start > until:
            gaps.append(start - until)
        begin = start if until is None else max(start, until)
        busy += max(0.0, stop - begin)
        until = stop if until is None else max(until, stop)
    return {
        "busy_seconds": busy / 1e6,
        "gap_seconds": sum(gaps) / 1e6,
        "longest_gap_seconds": max(gaps, default=0.0) / 1e6,
    }


def launched(events):
    """Return the events of a GPU, which are kernels, copies and fills, or a CPU's innermost
    operators."""
    if GPU:
        return [x for x in events if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    return [x for x in events if not x.cpu_children]


def profiled(function):
    """Call the function; return its profile and its result."""
    activity = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
    peak = allocations = None
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
    with profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        result = function()
        host = time.perf_counter() - began
        if GPU:
            torch.cuda.synchronize()
    if GPU:
        after, counted = torch.cuda.memory_stats(), "allocation.all.allocated"
        peak = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
        allocations = after[counted] - before[counted]
    events, by_name = launched(profiler.events()), defaultdict(list)
    for event in events:
        by_name[event.name].append(event.time_range.elapsed_us() / 1e6)
    longest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:SHOWN]
    found = {
        "host_seconds": host,  # until all kernels are launched; the profiler slows this down
        "launches": len(events),
        **use([(x.time_range.start, x.time_range.end) for x in events]),
        "peak_bytes": peak,  # in addition to what was allocated before the pass
        "allocations": allocations,
        "kernels": {
            name[:100]: {"launches": len(by_name[name]), "seconds": sum(by_name[name])}
            for name in longest
        },
    }
    return found, result


def passes(strategy, documents, options):
    """Return the profiles of forward and backward in the second call of a layout."""
    total, rank = options.tokens * options.ranks, options.ranks // 2
    layout = Layout.zigzag([total * i // documents for i in range(documents + 1)], options.ranks)
    attn, n = module(strategy, SilentComm(rank, options.ranks)), layout.tokens_on(rank)
    made = {"device": DEVICE, "dtype": DTYPE}
    query_heads, kv_heads = options.heads
    q, k, v, dout = (
        torch.randn(n, heads, options.dim, **made)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    operands = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        return attn(*operands, layout, causal=True)

    torch.autograd.grad(forward(), operands, dout)
    of_forward, out = profiled(forward)
    of_backward, _ = profiled(lambda: torch.autograd.grad(out, operands, dout))
    return {"forward": of_forward, "backward": of_backward}


ARGUMENTS = {
    "--folder": (RESULTS, "folder of the result file"),
    "--tokens": (16384, "of each rank"),
    "--ranks": 8,
    "--heads": ([32, 8], "query and KV heads"),
    "--dim": 128,
    "--documents": [1, 32],
}


def main():
    options = harness.arguments_of(__doc__, ARGUMENTS)
    sizes = {name: getattr(options, name) for name in ("tokens", "ranks", "heads", "dim")}
    results = []
    profiled(lambda: torch.ones(1, device=DEVICE))  # the first profile of a process takes longer
    for documents in options.documents:
        for strategy in STRATEGIES:
            result = {"strategy": strategy, "documents": documents}
            try:
                result |= passes(strategy, documents, options)
            except Exception as error:
                result |= refusal(strategy, error)
            results.append(result)
            harness.write(options.folder, "profiles", {"sizes": sizes, "results": results})
            print(line(result), flush=True)
            if not usable():
                return 1
    return int(any("refused" in x for x in results))


def line(result):
    """Describe in one line what the passes of a strategy took."""
    said = f"{result['strategy']}, {result['documents']} documents: "
    if "refused" in result:
        return said + result["refused"]
    return said + "; ".join(
        f"{way} {found['launches']} launches, busy {found['busy_seconds'] * 1e3:.2f} ms, "
        f"gaps {found['gap_seconds'] * 1e3:.2f} ms, peak {found['peak_bytes']} bytes"
        for way in ("forward", "backward")
        for found in [result[way]]
    )


if __name__ == "__main__":
    sys.exit(main())
