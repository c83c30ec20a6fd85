"""Measure the cost of the same bits on any number of ranks, and the effects of 8-bit messages.

2 ranks × 1 thread, N tokens, 8 heads, D = 64, causal, fp32, forward + backward: each strategy by
default, with `deterministic="ranks"`, and with keys and values, or TokenRing's partial results, in
8 bits. Rounds interleave all contenders; the figure is the ratio of medians to the strategy's
default. First, each result is compared with SDPA in fp64, and the bits on 2 ranks with the bits on
one.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import Network
from seqpar import Layout, make_attention
from seqpar.bench.workloads import contenders
from seqpar.softmax.module import Attention

HEADS, DIM, RANKS = 8, 64, 2
PARTS = "out", "dq", "dk", "dv"
AS_IT_IS, SAME_BITS, EIGHT_BITS = "as it is", "the same bits", "8 bits"
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "ring": {SAME_BITS: {"deterministic": "ranks"}, EIGHT_BITS: {"message_dtype": torch.int8}},
    "all_gather": {
        SAME_BITS: {"deterministic": "ranks"},
        EIGHT_BITS: {"message_dtype": torch.int8},
    },
    "ulysses": {SAME_BITS: {"deterministic": "ranks"}},
    "token_ring": {EIGHT_BITS: {"partial_dtype": torch.int8}},
}
NAMES = [(strategy, way) for strategy, ways in WAYS.items() for way in (AS_IT_IS, *ways)]


def step(attn: Attention, layout: Layout, whole: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Return the seconds of a rank's forward and backward, and its out, dq, dk and dv."""
    *operands, dout = (layout.shard(x, attn.rank) for x in whole)
    for x in operands:
        x.requires_grad_()
    start = time.perf_counter()
    out = attn(*operands, layout, causal=True)
    gradients = torch.autograd.grad(out, operands, dout)
    return time.perf_counter() - start, [out.detach(), *gradients]


def errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Return each result's RMS error, over the RMS of the exact result."""
    pairs = zip(PARTS, found, exact, strict=True)
    return {name: harness.worst_error([x], [y]) for name, x, y in pairs}


def checked(attentions: dict[Any, Attention], whole: list[Tensor], layout: Layout) -> Any:
    """Return each contender's errors and bytes. Rank 0 exits if one of ours is wrong."""
    rank, group = dist.get_rank(), dist.group.WORLD
    alone, one = dist.new_group([0]), Layout.contiguous(layout.tokens, 1)
    exact: list[Tensor] = []
    limits: dict[str, float] = {}
    if not rank:
        exact, plain = (sdpa(whole, dtype) for dtype in (torch.float64, torch.float32))
        limits = {name: 1.35 * x for name, x in errors(plain, exact).items()}
    found = {}
    for (strategy, way), attn in attentions.items():
        before = attn.sent_bytes
        parts = step(attn, layout, whole)[1]
        sent = attn.sent_bytes - before
        packed = [layout.unshard(x, group) for x in parts]
        if rank:
            continue
        wrong = errors(packed, exact)
        if way != EIGHT_BITS and any(wrong[name] > limits[name] for name in PARTS):
            raise SystemExit(f"{strategy} {way} has wrong results: {wrong}")
        if way == SAME_BITS:
            of_one = step(make_attention(strategy, alone, deterministic="ranks"), one, whole)[1]
            if not all(torch.equal(x, y) for x, y in zip(packed, of_one, strict=True)):
                raise SystemExit(f"{strategy} has different bits on {RANKS} ranks and on one")
        found[f"{strategy}, {way}"] = {"errors": wrong, "bytes": sent}
    return found


def sdpa(whole: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    *operands, dout = (x.to(dtype) for x in whole)
    for x in operands:
        x.requires_grad_()
    out = contenders.sdpa(*operands, causal=True)
    return [out.detach(), *torch.autograd.grad(out, operands, dout)]


def timed(tokens: int, rounds: int) -> Any:
    """Check all contenders, then return the checks and the seconds of interleaved rounds."""
    generator, layout = torch.Generator().manual_seed(0), Layout.zigzag(tokens, RANKS)
    whole = [torch.randn(tokens, HEADS, DIM, generator=generator) for _ in range(4)]
    attentions = {
        name: make_attention(name[0], dist.group.WORLD, **WAYS[name[0]].get(name[1], {}))
        for name in NAMES
    }
    checks = checked(attentions, whole, layout)
    samples: dict[str, list[float]] = {}
    with harness.progress(rounds * len(NAMES)) as begin:
        for _, name in harness.turns(NAMES, rounds):
            begin(", ".join(name))
            dist.barrier()
            seconds = torch.tensor(step(attentions[name], layout, whole)[0])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            samples.setdefault(", ".join(name), []).append(float(seconds))
    return checks, samples


def measure(options: Namespace) -> dict[str, Any]:
    with Network("loopback", RANKS, timeout=1200) as network:
        (checks, samples), _ = network(timed, options.tokens, options.rounds)
    medians = {", ".join(name): statistics.median(samples[", ".join(name)]) for name in NAMES}
    as_it_is = {name: medians[f"{name.split(', ')[0]}, {AS_IT_IS}"] for name in medians}
    ratios = {name: seconds / as_it_is[name] for name, seconds in medians.items()}
    for name, ratio in ratios.items():
        found = checks[name]
        shown = ", ".join(f"{part} {x:.1e}" for part, x in found["errors"].items())
        time_of = f"{medians[name] * 1e3:8.1f} ms   {ratio:.3f}"
        print(f"{name:28s} {time_of}   {found['bytes'] / 2**20:6.1f} MiB   errors {shown}")
    shape = {"tokens": options.tokens, "heads": HEADS, "head_dim": DIM, "ranks": RANKS}
    return {"shape": shape, "checks": checks, "ratios": ratios, "seconds": samples}


def main() -> None:
    harness.run("same-bits", __doc__, {"--tokens": 8192, "--rounds": 9}, measure)


if __name__ == "__main__":
    main()
