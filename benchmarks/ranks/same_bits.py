"""Measure the cost of the same bits on any number of ranks, and the effects of 8-bit messages.

2 ranks × 1 thread, N tokens, 8 heads, D = 64, causal, fp32, forward + backward: each strategy by
default, with `deterministic="ranks"`, and with keys and values, or TokenRing's partial results, in
8 bits. Rounds interleave all contenders; the figure is the ratio of medians to the strategy's
default. First, each result is compared with SDPA in fp64, and the bits on 2 ranks with the bits on
one. If the machine was unsteady, a run writes no results: run it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import RESULTS, harness
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
    """Return out, dq, dk and dv of one call of SDPA."""
    *operands, dout = (x.to(dtype) for x in whole)
    for x in operands:
        x.requires_grad_()
    out = contenders.sdpa(*operands, causal=True)
    return [out.detach(), *torch.autograd.grad(out, operands, dout)]


def serve(rank: int, tokens: int, rounds: int, store: str, pipe: Connection) -> None:
    """Run a rank: check all contenders, then time them in interleaved rounds."""
    torch.set_num_threads(1)
    files = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=RANKS)
    generator, layout = torch.Generator().manual_seed(0), Layout.zigzag(tokens, RANKS)
    whole = [torch.randn(tokens, HEADS, DIM, generator=generator) for _ in range(4)]
    attentions = {
        name: make_attention(name[0], dist.group.WORLD, **WAYS[name[0]].get(name[1], {}))
        for name in NAMES
    }
    checks = checked(attentions, whole, layout)
    samples: dict[str, list[float]] = {}
    with harness.progress(rounds * len(NAMES)) as begin:
        for _ in range(rounds):
            for name, attn in attentions.items():
                begin(", ".join(name))
                dist.barrier()
                seconds = torch.tensor(step(attn, layout, whole)[0])
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                samples.setdefault(", ".join(name), []).append(float(seconds))
    pipe.send((checks, samples))
    dist.destroy_process_group()


def measured(tokens: int, rounds: int) -> Any:
    """Return rank 0's checks and samples."""
    context, ends = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = rank, tokens, rounds, f"{folder}/store", theirs
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ends.append((ours, process))
        try:
            found, _ = (pipe.recv() for pipe, _ in ends)
        except EOFError:
            raise SystemExit("a rank ended early, without results") from None
        for _, process in ends:
            process.join()
    return found


def main() -> int:
    """Check and time all contenders, print ratios, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    before = harness.canary()
    checks, samples = measured(options.tokens, options.rounds)
    after = harness.canary()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    as_it_is = {name: medians[f"{name.split(', ')[0]}, {AS_IT_IS}"] for name in medians}
    ratios = {name: seconds / as_it_is[name] for name, seconds in medians.items()}
    for name, ratio in ratios.items():
        found = checks[name]
        shown = ", ".join(f"{part} {x:.1e}" for part, x in found["errors"].items())
        time_of = f"{medians[name] * 1e3:8.1f} ms   {ratio:.3f}"
        print(f"{name:28s} {time_of}   {found['bytes'] / 2**20:6.1f} MiB   errors {shown}")
    drift = harness.check_canary(before, after)
    if not options.no_write:
        shape = {"tokens": options.tokens, "heads": HEADS, "head_dim": DIM, "ranks": RANKS}
        results = {"shape": shape, "canary_drift": drift, "checks": checks}
        harness.write(RESULTS, "same-bits", results | {"ratios": ratios, "seconds": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
