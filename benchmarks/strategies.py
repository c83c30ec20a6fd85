"""Every strategy on 2 ranks × 1 thread, against one process × 2 threads of SDPA and against two other ways to shard it.

N tokens, 8 heads, D = 64, causal, forward and forward + backward. All contenders stand ready in processes of their own and
take turns, round after round; the figure is the ratio of medians. Each is first checked against SDPA in fp64. A run during
which the machine was unsteady writes nothing: run it again.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from seqpar import Layout, make_attention

HEADS, DIM, RANKS = 8, 64, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = {"ring": Layout.zigzag, "all_gather": Layout.zigzag, "ulysses": Layout.contiguous}
SDPA, HAND, PACKAGE = "SDPA, 1 process × 2 threads", "all-to-all by hand", "ring-attention-pytorch"


class HandWritten(torch.autograd.Function):
    """The all-to-all that people write by hand around SDPA: (T/P, H, D) -> (T, H/P, D), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return all_to_all(x, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_to_all(gradient, not ctx.to_heads), None


def all_to_all(x: Tensor, to_heads: bool) -> Tensor:
    if to_heads:
        sent = x.unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received.flatten(0, 1)
    sent = x.unflatten(0, (RANKS, -1)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.transpose(0, 1).flatten(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, H, D), causal."""
    return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)[0].transpose(0, 1)


def contender(name: str, rank: int, tokens: int) -> tuple[Any, Tensor]:
    """A function of this rank's q, k and v, and the indices of the tokens that it takes."""
    if name == SDPA:
        return sdpa, torch.arange(tokens)
    if name == HAND:
        share = torch.arange(tokens).chunk(RANKS)[rank]
        return lambda q, k, v: HandWritten.apply(sdpa(*(HandWritten.apply(x, True) for x in (q, k, v))), False), share
    if name == PACKAGE:
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        share = torch.arange(tokens).chunk(RANKS)[rank]
        return lambda q, k, v: ring_flash_attn(q[None], k[None], v[None], causal=True, ring_reduce_col=True)[0], share
    layout = LAYOUTS[name](tokens, RANKS)
    attention = make_attention(name, dist.group.WORLD)
    return lambda q, k, v: attention(q, k, v, layout, causal=True), layout.token_indices(rank)


@functools.cache
def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def serve(rank: int, threads: int, store: str, pipe: Connection) -> None:
    """A process of a contender: times, or checks, what it is told to."""
    torch.set_num_threads(threads)
    if rank >= 0:
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    while (task := pipe.recv()) is not None:
        kind, name, tokens, dtype, backward = task
        if kind == "canary":
            pipe.send(harness.canary())
            continue
        function, index = contender(name, max(rank, 0), tokens)
        q, k, v, dout = (x[index] for x in inputs(tokens, dtype))
        operands = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        if rank >= 0:
            dist.barrier()
        start = time.perf_counter()
        out = function(*operands)
        gradients = torch.autograd.grad(out, operands, dout) if backward else ()
        seconds = time.perf_counter() - start
        pipe.send(seconds if kind == "time" else (index, [x.detach() for x in (out, *gradients)]))


def packed(parts: list[tuple[Tensor, list[Tensor]]], tokens: int) -> list[Tensor]:
    """The ranks' results in packed order."""
    whole = [torch.empty(tokens, *x.shape[1:], dtype=torch.float64) for x in parts[0][1]]
    for index, results in parts:
        for total, x in zip(whole, results, strict=True):
            total[index] = x.double()
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[*LAYOUTS, HAND, PACKAGE], help="contenders besides SDPA")
    parser.add_argument("--no-write", action="store_true", help="print, and write no result files")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank, threads in ((-1, RANKS), *((rank, 1) for rank in range(RANKS))):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, threads, f"{folder.name}/store", theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)

    def ask(*task: Any) -> list[Any]:
        asked = pipes[:1] if task[1] in (SDPA, None) else pipes[1:]
        for pipe in asked:
            pipe.send(task)
        return [pipe.recv() for pipe in asked]

    names = [SDPA, *options.only]
    tasks = [(dtype, backward) for dtype in DTYPES for backward in (False, True)]
    exact = packed(ask("check", SDPA, options.tokens, torch.float64, True), options.tokens)
    errors: dict[str, dict[str, list[float]]] = {}
    for dtype in DTYPES:
        for name in names:
            if name == PACKAGE and dtype == "bf16":
                continue  # it raises: it mixes dtypes
            got = packed(ask("check", name, options.tokens, DTYPES[dtype], True), options.tokens)
            errors.setdefault(dtype, {})[name] = [
                float((x - y).square().mean().sqrt()) for x, y in zip(got, exact, strict=True)
            ]
        for name, found in errors[dtype].items():
            worst = max(x / y for x, y in zip(found, errors[dtype][SDPA], strict=True))
            shown = ", ".join(f"{of} {x:.1e}" for of, x in zip(("out", "dq", "dk", "dv"), found, strict=True))
            print(f"{dtype} {name}: RMS errors {shown}: at most {worst:.2f} times those of SDPA", flush=True)
            if worst > 1.35 and name in LAYOUTS:
                raise SystemExit(f"{name} is wrong in {dtype}: nothing was timed")

    before = ask("canary", None, 0, None, False)[0]
    samples: dict[str, list[float]] = {}
    for round_number in range(options.rounds):
        print(f"\rround {round_number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
        for dtype, backward in tasks:
            order = [name for name in errors[dtype] if name != PACKAGE or round_number % 4 == 0]  # that one is slow
            for name in order[round_number % len(order) :] + order[: round_number % len(order)]:
                time.sleep(0.05)  # the threads of the one before may spin a while
                seconds = max(ask("time", name, options.tokens, DTYPES[dtype], backward))
                samples.setdefault(f"{dtype}/{'forward+backward' if backward else 'forward'}/{name}", []).append(seconds)
    print(file=sys.stderr)
    after = ask("canary", None, 0, None, False)[0]
    for pipe in pipes:
        pipe.send(None)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    ratios = {key: medians[key.rsplit("/", 1)[0] + "/" + SDPA] / value for key, value in medians.items()}
    for key, value in medians.items():
        print(f"{key:60s} {value * 1e3:9.1f} ms   {ratios[key]:.3f} of SDPA")
    try:
        drift = harness.check_canary(before, after)
    except harness.UnsteadyError as refusal:
        print(f"refused: {refusal}")
        return 1
    if not options.no_write:
        shape = {"tokens": options.tokens, "heads": HEADS, "head_dim": DIM, "causal": True, "ranks": RANKS}
        results = {"shape": shape, "canary_drift": drift, "rms_errors": errors, "ratio_to_sdpa": ratios, "seconds": samples}
        harness.write("strategies", results)
        plot(ratios)
    return 0


def plot(ratios: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({key.rsplit("/", 1)[0] for key in ratios}, key=lambda group: (not group.startswith("fp32"), len(group)))
    names = list(dict.fromkeys(key.rsplit("/", 1)[1] for key in ratios))
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for i, name in enumerate(names):
        heights = [ratios.get(f"{group}/{name}", 0.0) for group in groups]
        bars = axes.bar([x + i * 0.13 for x in range(len(groups))], heights, 0.12, label=name)
        axes.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=6)
    axes.set_xticks([x + 0.13 * (len(names) - 1) / 2 for x in range(len(groups))], [g.replace("/", ", ") for g in groups])
    axes.set_ylabel("speed, SDPA on one process = 1")
    axes.legend(fontsize=7, ncols=3, loc="lower center")
    figure.savefig(harness.RESULTS / "strategies.png", dpi=150)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(RANKS))
    sys.exit(main())
