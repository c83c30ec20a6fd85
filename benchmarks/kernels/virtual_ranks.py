"""Measure the time and memory of many ranks, whose work one device computes rank by rank.

* `kernels`: the time of one kernel over all tokens divided by the time of all ranks' kernels, for
  zigzag Ring and Ulysses, from 32K tokens to 1M on 2 to 64 ranks (`efficiency.py`).
* `layouts`: the same for all strategies and layouts, with one document and with 32.
* `memory`: the peak memory of a rank's attention, with the simulated peak.
* `training`: a step of a GPT's layers on one of 8 ranks, which immediately receives noise instead
  of messages: the share of the device's peak rate of matrix products that the model uses (MFU).

Results are written after each workload, and the next start continues after them.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import RESULTS, harness
from benchmarks.block import Block
from benchmarks.kernels.device import DEVICE, GPU, START_AGAIN, device_rates, refusal, usable
from benchmarks.kernels.efficiency import BACKEND, PASSES, Alone, Sizes, measure
from seqpar import Layout, make_attention, simulate, use_backend
from seqpar.bench.results.results_file import SAME, check_same
from seqpar.comm.messages.comm import Comm

KERNELS = {"ring": "zigzag", "ulysses": "zigzag"}
STRATEGIES = ("ring", "ulysses", "all_gather", "token_ring")
LAYOUTS, DOCUMENTS = ("zigzag", "contiguous", "striped"), (1, 32)
LENGTHS, RANKS = (2**15, 2**17, 2**19, 2**20), (2, 8, 64)
TARGET = 0.97  # efficiency of both passes together, at 128K tokens on 8 ranks
DTYPE = torch.bfloat16 if GPU else torch.float32


def kernels(tokens: int, ranks: int, options: Namespace) -> dict[str, Any]:
    """Return the efficiencies of each strategy's kernels."""
    sizes = Sizes(tokens, *options.heads, options.dim, ranks)
    rounds = options.rounds if tokens <= 2**17 else 1
    found = {}
    for strategy, kind in KERNELS.items():
        each = measure(strategy, kind, [0, tokens], sizes, rounds)
        ranked = [sum(rank[i] for rank in each["ranks"]) for i in range(2)]
        both = sum(each["one"]) / sum(ranked)
        found[strategy] = {name: each[name]["efficiency"] for name in PASSES} | {"both": both}
    return found


def layout(
    strategy: str, kind: str, documents: int, tokens: int, ranks: int, options: Namespace
) -> dict[str, Any]:
    """Return the efficiency of a strategy's kernels on a layout, and the slowest rank's share."""
    edges = [tokens * i // documents for i in range(documents + 1)]
    sizes = Sizes(tokens, *options.heads, options.dim, ranks)
    found = measure(strategy, kind, edges, sizes, options.rounds)
    return {name: found[name] for name in PASSES}


def attention(
    strategy: str, layout: Layout, shape: tuple[int, int, int], device: str, dtype: torch.dtype
) -> Callable[[Comm], None]:
    """Return a rank's causal attention, forward and backward, with (heads, KV heads, dim)."""
    heads, kv_heads, dim = shape

    def code(comm: Comm) -> None:
        n = layout.tokens_on(comm.rank)
        made: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
        q, k, v = (torch.randn(n, h, dim, **made) for h in (heads, kv_heads, kv_heads))
        out = make_attention(strategy, comm)(q, k, v, layout, causal=True)
        out.backward(torch.empty_like(out))

    return code


def memory(tokens: int, ranks: int, options: Namespace) -> dict[str, Any]:
    """Return the peak bytes of a rank's attention, including its operands.

    Measured bytes are None on devices for which torch does not count them.
    """
    layout, shape, found = Layout.zigzag(tokens, ranks), (*options.heads, options.dim), {}
    for strategy in STRATEGIES:
        code = attention(strategy, layout, shape, "meta", DTYPE)
        (program,) = simulate.record(code, ranks, only=[0])
        measured = None
        if GPU:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attention(strategy, layout, shape, "cuda", DTYPE)(Alone(0, ranks))
            measured = torch.cuda.max_memory_allocated() - before
        found[strategy] = {"simulated": program.peak_bytes, "measured": measured}
    return found


def training(tokens: int, ranks: int, options: Namespace) -> dict[str, Any]:
    """Return the seconds of a forward and a backward of a layer on each rank in turn, and the MFU.

    FLOPs count the model's products and the pairs of the mask, without recomputation.
    """
    layout, dim = Layout.zigzag(tokens, ranks), options.dim
    peak = device_rates()[1][DTYPE]
    width, found = options.heads[0] * dim, {}
    for strategy in KERNELS:
        seconds, weights = 0.0, 0
        for rank in range(ranks):
            attn = make_attention(strategy, Alone(rank, ranks))
            attend = partial(attn, layout=layout, causal=True)
            block = Block(*options.heads, dim, 7 * width // 2, device=DEVICE, dtype=DTYPE)
            weights = sum(x.numel() for x in block.parameters() if x.dim() == 2)
            x = torch.randn(layout.tokens_on(rank), width, device=DEVICE, dtype=DTYPE)
            step = partial(block, x, attend)
            seconds += _step_seconds(lambda step=step: step().sum().backward())  # type: ignore[misc]
        flops = 6 * weights * tokens + 12 * width * tokens * (tokens + 1) / 2
        found[strategy] = {"seconds": seconds, "flops": flops, "mfu": flops / seconds / peak}
    return found | {"peak": peak}


def _step_seconds(step: Callable[[], object], rounds: int = 3) -> float:
    """Return the median seconds of a step, until the device has finished."""

    def finished() -> None:
        step()
        if GPU:
            torch.cuda.synchronize()

    return harness.median_time(finished, rounds)


def workloads(options: Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the workloads by name, the quickest first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for tokens in options.tokens:
        for ranks in options.ranks:
            name = f"{tokens} tokens, {ranks} ranks"
            found[f"kernels: {name}"] = lambda n=tokens, p=ranks: kernels(n, p, options)
    tokens, ranks = options.tokens[0], options.ranks[min(1, len(options.ranks) - 1)]
    name = f"{tokens} tokens, {ranks} ranks"
    found[f"memory: {name}"] = lambda: memory(tokens, ranks, options)
    cases = itertools.product((*STRATEGIES, "usp"), LAYOUTS, DOCUMENTS)
    for case in cases:
        of = "{}, {}, {} documents".format(*case)
        found[f"layouts: {of}"] = lambda x=case: layout(*x, tokens, ranks, options)  # type: ignore[misc]
    found[f"training: {name}"] = lambda: training(tokens, ranks, options)
    return found


def reached(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether each measured strategy reaches the target."""
    wanted = f"kernels: {2**17} tokens, 8 ranks"
    found = [x for x in results if x["workload"] == wanted and "refused" not in x]
    return {name: x[name]["both"] >= TARGET for x in found for name in KERNELS}


ARGUMENTS = {
    "--folder": (RESULTS, "folder of the result file"),
    "--seconds": (480.0, "begin no workload after this time"),
    "--tokens": [*LENGTHS] if GPU else [2048, 4096],
    "--ranks": [*RANKS] if GPU else [2, 8],
    "--heads": ([8, 2], "query and KV heads"),
    "--dim": 128,
    "--rounds": 5,
}


def main() -> int:
    options = harness.arguments_of(__doc__, ARGUMENTS)
    path, began = harness.results_file(options.folder, "virtual-ranks"), time.monotonic()
    known = json.loads(path.read_text()) if path.is_file() else {}
    asked = {"heads": [*options.heads], "dim": options.dim, "rounds": options.rounds}
    if known:
        check_same(path, "of another machine", known["environment"], harness.environment(), SAME)
        check_same(path, "of other options", known.get("asked", {}), asked, tuple(asked))
    results = [x for x in known.get("results", []) if "refused" not in x]
    done = {x["workload"] for x in results}
    for name, run in workloads(options).items():
        if name in done:
            continue
        if time.monotonic() > began + options.seconds:
            return START_AGAIN
        try:
            with use_backend(BACKEND):
                result = run()
        except Exception as error:
            result = refusal(name, error)
        print(f"{name}: {result}", flush=True)
        results.append({"workload": name} | result)
        written = {"asked": asked, "target": TARGET, "reached": reached(results)}
        harness.write(options.folder, "virtual-ranks", written | {"results": results})
        if not usable():
            return START_AGAIN
    return int(any("refused" in x for x in results) or not all(reached(results).values()))


if __name__ == "__main__":
    sys.exit(main())
