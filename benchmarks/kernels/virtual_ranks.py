"""Measure the time and memory of many ranks, whose work one device computes rank by rank.

* `kernels`: the time of one kernel over all tokens divided by the time of all ranks' kernels, for
  zigzag Ring and Ulysses, from 32K tokens to 1M on 2 to 64 ranks (`efficiency.py` has more
  strategies and layouts for one length).
* `memory`: the peak memory of a rank's attention, with the simulated peak; and from it, the longest
  batch of Llama 3 8B on 8 ranks, by strategy and device memory.
* `training`: a step of a GPT's layers on one of 8 ranks, which immediately receives noise instead
  of messages: the share of the device's peak rate of matrix products that the model uses (MFU).

Results are written after each workload, and the next start continues after them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import RESULTS, harness
from benchmarks.kernels.device import DEVICE, GPU, START_AGAIN, device_rates, refusal, usable
from benchmarks.kernels.efficiency import BACKEND, PASSES, Alone, Sizes, measure
from seqpar import Layout, make_attention, simulate, use_backend
from seqpar.bench.results.results import SAME, check_same
from seqpar.comm.messages.exchange import Comm
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Model

KERNELS = {"ring": "zigzag", "ulysses": "zigzag"}
STRATEGIES = ("ring", "ulysses", "all_gather", "token_ring")
LENGTHS, RANKS = (2**15, 2**17, 2**19, 2**20), (2, 8, 64)
TARGET = 0.97  # efficiency of both passes together, at 128K tokens on 8 ranks
DTYPE = torch.bfloat16 if GPU else torch.float32


def kernels(tokens: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
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


def memory(tokens: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
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


def longest(ranks: int, caps: list[float]) -> dict[str, dict[str, int]]:
    """Return the tokens of the longest batch of Llama 3 8B that fits, by strategy and memory in GB.

    In bf16, with full checkpointing, and parameters sharded over the ranks.
    """
    model = Model.preset("llama-8b")
    costs, shape = Costs(Cluster.preset("1x8-h100"), model), (32, 8, 128)
    fixed, layout, found = costs.parameter_bytes(ranks), Layout.zigzag(2**15, ranks), {}
    tokens = layout.tokens_on(0)
    kept = tokens * model.attention_elements(model.layers[0]) * costs.itemsize
    for strategy in STRATEGIES:
        code = attention(strategy, layout, shape, "meta", torch.bfloat16)
        (program,) = simulate.record(code, ranks, only=[0])
        held = float(costs.activation_bytes(tokens, "full")) + max(0, program.peak_bytes - kept)
        free = {cap: max(0.0, cap * 1e9 - fixed) for cap in caps}
        found[strategy] = {f"{cap:g}": int(ranks * tokens * x / held) for cap, x in free.items()}
    return found


class Block(nn.Module):
    """A GPT's layer: one rank's tokens attend to all ranks' tokens; then a feed-forward part."""

    def __init__(self, width: int, heads: tuple[int, int], dim: int, attention: nn.Module) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "bias": False}
        self.heads, self.dim, self.attention = heads, dim, attention
        self.norms = nn.ModuleList(nn.RMSNorm(width, device=DEVICE, dtype=DTYPE) for _ in range(2))
        self.project = nn.Linear(width, (heads[0] + 2 * heads[1]) * dim, **made)
        self.out = nn.Linear(heads[0] * dim, width, **made)
        self.gate_up, self.down = (nn.Linear(*x, **made) for x in _feed_forward(width))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the layer's output of (tokens, width)."""
        q_heads, kv_heads = self.heads
        projected = self.project(self.norms[0](x)).unflatten(-1, (-1, self.dim))
        q, k, v = projected.split([q_heads, kv_heads, kv_heads], 1)
        x = x + self.out(self.attention(q, k, v, layout, causal=True).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def _feed_forward(width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (width, 7 * width), (7 * width // 2, width)


def training(tokens: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a forward and a backward of a layer on each rank in turn, and the MFU.

    FLOPs count the model's products and the pairs of the mask, without recomputation.
    """
    layout, heads, dim = Layout.zigzag(tokens, ranks), tuple(options.heads), options.dim
    peak = device_rates()[1][DTYPE]
    width, found = heads[0] * dim, {}
    for strategy in KERNELS:
        seconds, weights = 0.0, 0
        for rank in range(ranks):
            block = Block(width, heads, dim, make_attention(strategy, Alone(rank, ranks)))
            weights = sum(x.numel() for x in block.parameters() if x.dim() == 2)
            x = torch.randn(layout.tokens_on(rank), width, device=DEVICE, dtype=DTYPE)
            seconds += _step_seconds(lambda b=block, x=x: b(x, layout).sum().backward())  # type: ignore[misc]
        flops = 6 * weights * tokens + 12 * heads[0] * dim * tokens * (tokens + 1) / 2
        found[strategy] = {"seconds": seconds, "flops": flops, "mfu": flops / seconds / peak}
    return found | {"peak": peak}


def _step_seconds(step: Callable[[], object], rounds: int = 3) -> float:
    """Return the median seconds of a step, until the device has finished."""

    def finished() -> None:
        step()
        if GPU:
            torch.cuda.synchronize()

    return harness.median_time(finished, rounds)


def workloads(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the workloads by name, the quickest first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for tokens in options.tokens:
        for ranks in options.ranks:
            name = f"{tokens} tokens, {ranks} ranks"
            found[f"kernels: {name}"] = lambda n=tokens, p=ranks: kernels(n, p, options)
    tokens, ranks = options.tokens[0], options.ranks[min(1, len(options.ranks) - 1)]
    name = f"{tokens} tokens, {ranks} ranks"
    found[f"memory: {name}"] = lambda: memory(tokens, ranks, options)
    found["longest: 8 ranks"] = lambda: longest(8, [24, 40, 80, 141])
    found[f"training: {name}"] = lambda: training(tokens, ranks, options)
    return found


def reached(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether each measured strategy reaches the target."""
    wanted = f"kernels: {2**17} tokens, 8 ranks"
    found = [x for x in results if x["workload"] == wanted and "refused" not in x]
    return {name: x[name]["both"] >= TARGET for x in found for name in KERNELS}


def main() -> int:
    """Measure the remaining workloads, and print all results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument(
        "--seconds", type=float, default=480, help="begin no workload after this time"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS if GPU else (2048, 4096))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS if GPU else (2, 8))
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="query and KV heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
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
