"""Compare our attention kernels with other libraries' kernels, on one device.

Ours are the backend "triton" on a GPU and "aten" on a CPU. Each contender is first checked against
fp64 on sampled rows. Then rounds interleave all contenders on random data in rotated buffers, with
separate times of forward and backward; figures are medians. TFLOP/s count the area of the mask.
`limit` is the shortest possible time on the device: the larger of FLOPs over its measured matmul
rate and bytes over its measured copy rate. Linear attention (`linear.py`) is compared with
flash-linear-attention, the plain parallel form, and softmax attention on the same tensors.

The program starts no rounds after its time limit, and prints its table last. Failures, such as a
kernel that needs more memory than the device has, are recorded, and the next workload follows. On a
GPU, results are written after each workload, and `--resume` continues after them.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from seqpar.kernels.flash_attention.configs import VARIANTS
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import RESULTS, harness
from benchmarks.kernels import softmax_contenders as contenders
from benchmarks.kernels.device import (
    DEVICE,
    GPU,
    START_AGAIN,
    device_rates,
    refusal,
    seconds,
    usable,
)
from benchmarks.kernels.linear import Lightning
from benchmarks.kernels.softmax_workloads import Workload

# bytes: shared memory of all multiprocessors, or second-level caches
ON_CHIP = 132 * 228 * 1024 if GPU else 2 * 2**20
BUFFERS = 3
FACTORS = {"forward": 1.0, "backward": 2.5}  # FLOPs, in forwards
# relative error of a correct result: bf16 rounds inputs of the products
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def workloads() -> list[tuple[Workload | Lightning, torch.dtype]]:
    """Return the workloads for this device, with their dtypes."""
    if not GPU:
        shapes = [
            ("causal", {}),
            ("full", {}),
            ("window", {"window": 256}),
            ("packed", {"mean_document": 256}),
        ]
        made: list[Workload | Lightning] = [
            Workload(kind, 4096, 8, 8, 64, **options) for kind, options in shapes
        ]
        made.append(Workload("packed", 8192, 8, 8, 64, mean_document=512))
        made.append(Workload("ring step", 2048, 8, 8, 64))
        made += [Lightning(tokens, 8, 64) for tokens in (2048, 4096, 8192)]
        return [(work, dtype) for work in made for dtype in (torch.float32, torch.bfloat16)]
    made = [Lightning(2**n, 16, 128) for n in range(11, 21)]
    for dim, (heads, kv_heads) in itertools.product((128, 64), ((64, 8), (16, 16))):
        for tokens in [2**n * 1024 for n in range(1, 7)] if heads == 64 else [8192, 32768]:
            batch = max(1, 16384 // tokens)
            made += [
                Workload(kind, tokens, heads, kv_heads, dim, batch) for kind in ("causal", "full")
            ]
        made += [
            Workload(kind, 65536, heads, kv_heads, dim)
            for kind in ("packed", "window", "fused shards")
        ]
        made.append(Workload("ring step", 16384, heads, kv_heads, dim))
    made.append(Workload("full", 65536, 1, 1, 128))
    made.append(Workload("full", 65536, 32, 32, 128))
    return [(work, torch.bfloat16) for work in made]


def field_of(work: Workload | Lightning) -> dict[str, contenders.Attention | None]:
    """Return the contenders by name; None for one that cannot compute the workload."""
    if isinstance(work, Lightning):
        return work.field(DEVICE)
    mine = "triton" if GPU else "aten"
    made: dict[str, contenders.Attention | None] = {mine: contenders.ours(work, mine)}
    if GPU:
        made["one pass"] = contenders.ours(work, mine, deterministic=False)
        made |= {name: contenders.ours(work, mine, variant=name) for name in VARIANTS}
        made["FA2"] = contenders.flash_attention_2(work)
        made["cuDNN"] = contenders.sdpa(work, SDPBackend.CUDNN_ATTENTION)
        made["FA4"] = contenders.flash_attention_4(work)
        made["flex"] = (
            contenders.flex(work, DEVICE)
            if work.tokens in (8192, 65536) and work.heads == 64
            else None
        )
    else:
        made["SDPA"] = contenders.sdpa(work, None)
        made["flex"] = contenders.flex(work, DEVICE)
    if work.kind == "ring step":
        made[f"{mine}, running partial"] = contenders.continued(work, mine)
    return made


@dataclass
class Runner:
    """A contender on a workload: its calls, and their seconds."""

    name: str
    attention: contenders.Attention
    operands: list[list[Tensor]]
    has_backward: bool
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._graphs = [self.attention(*x[:3]) for x in self.operands] if self.has_backward else []

    def turn(self, buffer: int) -> None:
        """Time a forward and a backward on one of the buffers."""
        q, k, v, dout = self.operands[buffer]
        with torch.no_grad():
            self.forward.append(seconds(lambda: self.attention(q, k, v)))
        if self.has_backward:
            out = self._graphs[buffer]
            self.backward.append(
                seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
            )

    def extra_bytes(self) -> int:
        """Return the peak bytes of a forward, without its operands and its result."""
        q, k, v, _ = self.operands[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            out = self.attention(q, k, v)
        return torch.cuda.max_memory_allocated() - before - out.nbytes


def right(work: Workload | Lightning, dtype: torch.dtype, runner: Runner) -> dict[str, float]:
    """Return a contender's errors; raise a RuntimeError if they are too large."""
    if runner.name in getattr(work, "others", ()):
        return {}
    q, k, v, dout = runner.operands[0]
    out = runner.attention(q, k, v)
    gradients = list(torch.autograd.grad(out, (q, k, v), dout)) if runner.has_backward else None
    errors = work.errors([x.detach() for x in runner.operands[0]], out.detach(), gradients)
    if not all(error <= BOUND[dtype] for error in errors.values()):
        raise RuntimeError(f"{runner.name} has wrong results on {work.name}: {errors}")
    return errors


def measure(
    work: Workload | Lightning, dtype: torch.dtype, deadline: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield each contender's seconds, or the reason for its refusal."""
    operands = [work.operands(dtype, DEVICE, seed) for seed in range(BUFFERS)]
    for q, k, v, _ in operands:
        for x in (q, k, v):
            x.requires_grad_()
    runners = []
    for name, attention in field_of(work).items():
        if attention is None:
            continue
        try:
            backward = "partial" not in name and (GPU or name != "flex")
            inputs = operands if backward else [[x.detach() for x in buffer] for buffer in operands]
            runner = Runner(name, attention, inputs, backward)
            errors = right(work, dtype, runner)
        except Exception as error:  # a wrong result or no support, which the table shows
            yield refusal(name, error)
            continue
        runners.append((runner, errors))
    broken = {}
    for i in range(rounds):
        if i >= 3 and time.monotonic() > deadline:
            break
        for j in range(len(runners)):
            runner, _ = runners[(i + j) % len(runners)]
            try:
                if runner.name not in broken:
                    runner.turn(i % BUFFERS)
            except Exception as error:
                broken[runner.name] = refusal(runner.name, error)
    yield from broken.values()
    for runner, errors in runners:
        if runner.name in broken:
            continue
        times = {"forward": runner.forward, "backward": runner.backward}
        yield {
            "contender": runner.name,
            "errors": errors,
            "extra": runner.extra_bytes() if GPU else None,
            **times,
        }


def table(results: list[dict[str, Any]]) -> str:
    """Return TFLOP/s by mask area, our ratio to each peer, and each share of the limit."""
    rows = []
    for result in results:
        ours = next(run for run in result["runs"] if run["contender"] in ("triton", "aten"))
        for run in result["runs"]:
            name = result["workload"], run["contender"]
            if "refused" in run:
                rows.append([*name, "refused", "", "", "", run["refused"][:40]])
                continue
            took = {way: _median(run, way) for way in FACTORS}
            rates = [FACTORS[way] * result["flops"] / took[way] / 1e12 for way in FACTORS]
            ratios = [took[way] / _median(ours, way) for way in FACTORS]
            cells = (*rates, *ratios, result["limit"] / took["forward"])
            rows.append([*name, *("" if math.isnan(x) else f"{x:.3g}" for x in cells)])
    head = "workload", "contender", "forward", "backward", "ours ÷ it", "backward", "of limit"
    return harness.table(head, rows)


def _median(run: dict[str, Any], way: str) -> float:
    return statistics.median(run[way]) if run.get(way) else math.nan


ARGUMENTS = {
    "--seconds": (480.0, "start no round after this time"),
    "--rounds": (30 if GPU else 11, "rounds, at most; at least 3"),
    "--only": ("", "workloads whose name contains this"),
    "--no-write": (False, "print, and write no result file"),
    "--folder": (RESULTS, "for the result file"),
    "--resume": (False, "continue from results, and write after each workload"),
}


def main() -> int:
    options = harness.arguments_of(__doc__, ARGUMENTS)
    began, path = time.monotonic(), harness.results_file(options.folder, "kernels")
    known = json.loads(path.read_text()) if options.resume and path.is_file() else {}
    results: list[dict[str, Any]] = known.get("results", [])
    mine, done = "triton" if GPU else "aten", {result["workload"] for result in results}
    cases = [
        (work, dtype, name)
        for work, dtype in workloads()
        for name in [f"{work.name} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"]
        if options.only in name and name not in done
    ]
    # Decays over long distances are denormal, and would slow the plain parallel form tenfold.
    torch.set_flush_denormal(True)
    watched = not GPU and not options.resume  # a canary is for one run without a break
    before = harness.canary() if watched else 0.0
    copy_rate, matmul_rates = device_rates()
    rates = {"copy": copy_rate, **{str(dtype): rate for dtype, rate in matmul_rates.items()}}
    found: dict[str, Any] = {"rates": rates, "on_chip": ON_CHIP, "results": results}
    left = 0
    for i, (work, dtype, name) in enumerate(cases):
        deadline = began + options.seconds * (i + 1) / len(cases)
        if time.monotonic() > began + options.seconds:
            left = len(cases) - i
            print(f"time is up: {left} workloads were left out")
            break
        print(f"{i + 1}/{len(cases)} {name}", flush=True)
        moved = work.bytes(dtype.itemsize, ON_CHIP)
        limit = max(work.flops / matmul_rates[dtype], moved / copy_rate)
        try:
            runs = list(measure(work, dtype, deadline, options.rounds))
        except Exception as error:
            runs = [refusal(mine, error)]
        results.append({"workload": name, "flops": work.flops, "limit": limit, "runs": runs})
        if (GPU or options.resume) and not options.no_write:
            harness.write(options.folder, "kernels", found)
        if not usable():
            print(f"{name} left the device unusable")
            return START_AGAIN
    print(table(results))
    if watched:
        found["canary_drift"] = harness.check_canary(before, harness.canary())
    if not options.no_write:
        harness.write(options.folder, "kernels", found)
    if left and options.resume:
        return START_AGAIN
    return int(
        any(run["contender"] == mine and "refused" in run for x in results for run in x["runs"])
    )


if __name__ == "__main__":
    sys.exit(main())
