"""Compare the speed of each strategy on this machine's ranks with SDPA in one process.

2 ranks × 1 thread against one process × 2 threads of SDPA, and against two other ways to shard it:
N tokens, 8 heads, D = 64, causal, forward and forward + backward. All contenders run in separate
processes, and rounds interleave them; the figure is the ratio of medians. Each is first compared
with SDPA in fp64. If the machine was unsteady, a run writes no results: run it again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import RESULTS, harness
from seqpar import Layout, make_attention
from seqpar.bench.workloads import contenders

HEADS, DIM, RANKS = 8, 64, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = {"ring": Layout.zigzag, "all_gather": Layout.zigzag, "ulysses": Layout.contiguous}
SDPA, HAND, PACKAGE = "SDPA, 1 process × 2 threads", "all-to-all by hand", "ring-attention-pytorch"
PEERS = {HAND: contenders.all_to_all_by_hand, PACKAGE: contenders.ring_attention_pytorch}


def contender(name: str, rank: int, tokens: int) -> tuple[Any, Tensor]:
    """Return a function of this rank's q, k and v, and the indices of this rank's tokens."""
    if name == SDPA:
        return functools.partial(contenders.sdpa, causal=True), torch.arange(tokens)
    if name in PEERS:
        share = torch.arange(tokens).chunk(RANKS)[rank]
        return functools.partial(PEERS[name], causal=True), share
    layout = LAYOUTS[name](tokens, RANKS)
    attention = make_attention(name, dist.group.WORLD)
    return lambda q, k, v: attention(q, k, v, layout, causal=True), layout.token_indices(rank)


@functools.cache
def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and dout of all tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(4)
    ]


def serve(rank: int, threads: int, store: str, pipe: Connection) -> None:
    """Run a contender's process, which checks and times on request."""
    torch.set_num_threads(threads)
    if rank >= 0:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS
        )
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
    """Return the ranks' results in packed order."""
    whole = [torch.empty(tokens, *x.shape[1:], dtype=torch.float64) for x in parts[0][1]]
    for index, results in parts:
        for total, x in zip(whole, results, strict=True):
            total[index] = x.double()
    return whole


class Contenders:
    """The processes of all contenders: one for SDPA, and the ranks of the others."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._folder = tokens, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank, threads in ((-1, RANKS), *((rank, 1) for rank in range(RANKS))):
            ours, theirs = context.Pipe()
            arguments = (rank, threads, f"{self._folder.name}/store", theirs)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)

    def _ask(self, kind: str, name: str, dtype: torch.dtype | None, backward: bool) -> list[Any]:
        asked = self._pipes[:1] if name == SDPA else self._pipes[1:]
        for pipe in asked:
            pipe.send((kind, name, self._tokens, dtype, backward))
        return [pipe.recv() for pipe in asked]

    def canary(self) -> float:
        """Return `harness.canary` in the process of SDPA."""
        return self._ask("canary", SDPA, None, False)[0]

    def results(self, name: str, dtype: torch.dtype) -> list[Tensor]:
        """Return out, dq, dk and dv of all tokens, in packed order."""
        return packed(self._ask("check", name, dtype, True), self._tokens)

    def seconds(self, name: str, dtype: torch.dtype, backward: bool) -> float:
        """Return the seconds of one call on the slowest rank."""
        time.sleep(0.05)  # threads of the previous contender may still spin
        return max(self._ask("time", name, dtype, backward))

    def end(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.send(None)


Errors = dict[str, dict[str, list[float]]]  # by dtype and contender: of out, dq, dk and dv


def check(contenders: Contenders, names: list[str]) -> Errors:
    """Return the RMS errors against SDPA in fp64. Exits if one of ours is wrong."""
    exact = contenders.results(SDPA, torch.float64)
    errors: Errors = {}
    for dtype in DTYPES:
        errors[dtype] = {}
        for name in names:
            if name == PACKAGE and dtype == "bf16":
                continue  # raises, because it mixes dtypes
            got = contenders.results(name, DTYPES[dtype])
            pairs = zip(got, exact, strict=True)
            found = [float((x - y).square().mean().sqrt()) for x, y in pairs]
            errors[dtype][name] = found
            worst = max(x / y for x, y in zip(found, errors[dtype][SDPA], strict=True))
            parts = zip(("out", "dq", "dk", "dv"), found, strict=True)
            shown = ", ".join(f"{part} {x:.1e}" for part, x in parts)
            print(
                f"{dtype} {name}: RMS errors {shown}: at most {worst:.2f} times SDPA's",
                flush=True,
            )
            if worst > 1.35 and name in LAYOUTS:
                raise SystemExit(f"{name} has wrong results in {dtype}: no times were measured")
    return errors


def take_turns(contenders: Contenders, errors: Errors, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per round of each "dtype/pass/contender"."""
    samples: dict[str, list[float]] = {}
    tasks = [(dtype, backward) for dtype in DTYPES for backward in (False, True)]
    with harness.progress(rounds * len(tasks)) as begin:
        for i in range(rounds):
            for dtype, backward in tasks:
                passes = "forward+backward" if backward else "forward"
                begin(f"{dtype}, {passes}")
                # The package is slow, and takes part in every fourth round.
                names = [name for name in errors[dtype] if name != PACKAGE or i % 4 == 0]
                first = i % len(names)
                for name in names[first:] + names[:first]:
                    seconds = contenders.seconds(name, DTYPES[dtype], backward)
                    samples.setdefault(f"{dtype}/{passes}/{name}", []).append(seconds)
    return samples


def main() -> int:
    """Check and time all contenders, print ratios, and write the result files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    installed = importlib.util.find_spec("ring_attention_pytorch") is not None
    names = [*LAYOUTS, HAND, *[PACKAGE] * installed]
    parser.add_argument("--only", nargs="*", default=names, help="contenders in addition to SDPA")
    parser.add_argument("--no-write", action="store_true", help="only print: write no result files")
    options = parser.parse_args()
    contenders = Contenders(options.tokens)
    errors = check(contenders, [SDPA, *options.only])
    before = contenders.canary()
    samples = take_turns(contenders, errors, options.rounds)
    after = contenders.canary()
    contenders.end()
    medians = {key: statistics.median(values) for key, values in samples.items()}
    baselines = {key: medians[f"{key.rsplit('/', 1)[0]}/{SDPA}"] for key in medians}
    ratios = {key: baselines[key] / seconds for key, seconds in medians.items()}
    for key, seconds in medians.items():
        print(f"{key:60s} {seconds * 1e3:9.1f} ms   {ratios[key]:.3f} of SDPA")
    drift = harness.check_canary(before, after)
    if not options.no_write:
        shape = {"tokens": options.tokens, "heads": HEADS, "head_dim": DIM}
        shape |= {"causal": True, "ranks": RANKS}
        results = {"shape": shape, "canary_drift": drift, "rms_errors": errors}
        results |= {"ratio_to_sdpa": ratios, "seconds": samples}
        path = harness.write(RESULTS, "strategies", results)
        plot(ratios, path.with_suffix(".png"))
    return 0


def plot(ratios: dict[str, float], path: Path) -> None:
    """Draw the ratios, grouped by dtype and pass."""
    found = {key.rsplit("/", 1)[0] for key in ratios}
    groups = sorted(found, key=lambda group: (not group.startswith("fp32"), len(group)))
    names = list(dict.fromkeys(key.rsplit("/", 1)[1] for key in ratios))
    figure, axes = harness.pyplot().subplots(figsize=(9, 4.5), layout="constrained")
    for i, name in enumerate(names):
        heights = [ratios.get(f"{group}/{name}", 0.0) for group in groups]
        bars = axes.bar([x + i * 0.13 for x in range(len(groups))], heights, 0.12, label=name)
        axes.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=6)
    middles = [x + 0.13 * (len(names) - 1) / 2 for x in range(len(groups))]
    axes.set_xticks(middles, [group.replace("/", ", ") for group in groups])
    axes.set_ylabel("speed, SDPA on one process = 1")
    axes.legend(fontsize=7, ncols=3, loc="lower center")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(RANKS))
    sys.exit(main())
