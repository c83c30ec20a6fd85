"""Compare the speed of each strategy on this machine's ranks with SDPA in one process.

2 ranks × 1 thread against one process × 2 threads of SDPA, and against two other ways to shard it:
N tokens, 8 heads, D = 64, causal, forward and forward + backward. All contenders run in separate
processes, and rounds interleave them; the figure is the ratio of medians. Each is first compared
with SDPA in fp64.
"""

from __future__ import annotations

import functools
import importlib.util
import os
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
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(4)
    ]


def call(name: str, tokens: int, dtype: torch.dtype, backward: bool) -> Any:
    """Return the indices of this rank's tokens, its results, and the seconds of the call."""
    torch.set_num_threads(RANKS if name == SDPA else 1)
    rank = dist.get_rank()
    function, index = contender(name, rank, tokens)
    q, k, v, dout = (x[index] for x in inputs(tokens, dtype))
    operands = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    dist.barrier()
    start = time.perf_counter()
    out = function(*operands)
    gradients = torch.autograd.grad(out, operands, dout) if backward else ()
    seconds = time.perf_counter() - start
    return index, [x.detach() for x in (out, *gradients)], seconds


def seconds_of(*arguments: Any) -> float:
    time.sleep(0.05)  # threads of the previous contender may still spin
    return call(*arguments)[2]


def results_of(networks: dict[str, Network], name: str, tokens: int, dtype: torch.dtype) -> Any:
    """Return out, dq, dk and dv of all tokens, in packed order."""
    parts = networks[name](call, name, tokens, dtype, True)
    whole = [torch.empty(tokens, *x.shape[1:], dtype=torch.float64) for x in parts[0][1]]
    for index, results, _ in parts:
        for total, x in zip(whole, results, strict=True):
            total[index] = x.double()
    return whole


Errors = dict[str, dict[str, list[float]]]  # by dtype and contender: of out, dq, dk and dv


def check(networks: dict[str, Network], tokens: int) -> Errors:
    """Return the RMS errors against SDPA in fp64. Exits if one of ours is wrong."""
    exact = results_of(networks, SDPA, tokens, torch.float64)
    errors: Errors = {}
    for dtype in DTYPES:
        errors[dtype] = {}
        for name in networks:
            if name == PACKAGE and dtype == "bf16":
                continue  # raises, because it mixes dtypes
            got = results_of(networks, name, tokens, DTYPES[dtype])
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


def take_turns(
    networks: dict[str, Network], errors: Errors, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per round of each "dtype/pass/contender"."""
    samples: dict[str, list[float]] = {}
    tasks = [(dtype, backward) for dtype in DTYPES for backward in (False, True)]
    with harness.progress(rounds * len(tasks)) as begin:
        for dtype, backward in tasks:
            passes = "forward+backward" if backward else "forward"
            for i, name in harness.turns(errors[dtype], rounds):
                if name == SDPA:
                    begin(f"{dtype}, {passes}")
                if name == PACKAGE and i % 4:
                    continue  # it is slow, and takes part in every fourth round
                found = networks[name](seconds_of, name, tokens, DTYPES[dtype], backward)
                samples.setdefault(f"{dtype}/{passes}/{name}", []).append(max(found))
    return samples


def measure(options: Namespace) -> dict[str, Any]:
    tokens = options.tokens
    with (
        Network("loopback", 1, timeout=600) as one,
        Network("loopback", RANKS, timeout=600) as ranks,
    ):
        networks = {SDPA: one, **dict.fromkeys(options.only, ranks)}
        errors = check(networks, tokens)
        samples = take_turns(networks, errors, tokens, options.rounds)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    baselines = {key: medians[f"{key.rsplit('/', 1)[0]}/{SDPA}"] for key in medians}
    ratios = {key: baselines[key] / seconds for key, seconds in medians.items()}
    for key, seconds in medians.items():
        print(f"{key:60s} {seconds * 1e3:9.1f} ms   {ratios[key]:.3f} of SDPA")
    shape = {"tokens": tokens, "heads": HEADS, "head_dim": DIM, "causal": True, "ranks": RANKS}
    found = {"shape": shape, "rms_errors": errors}
    return found | {"ratio_to_sdpa": ratios, "seconds": samples}


INSTALLED = importlib.util.find_spec("ring_attention_pytorch") is not None
ARGUMENTS = {
    "--tokens": 8192,
    "--rounds": 9,
    "--only": ([*LAYOUTS, HAND, *[PACKAGE] * INSTALLED], "contenders in addition to SDPA"),
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(RANKS))
    harness.run("strategies", __doc__, ARGUMENTS, measure)
