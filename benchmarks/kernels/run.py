"""Are our attention kernels fast on one device, beside those that users have?

Ours are the backend "triton" on a GPU and "aten" on a CPU. Each contender is first checked against
fp64 on sampled rows. Then all take turns, round after round, on random data in rotated buffers,
forward and backward apart; figures are medians. TFLOP/s count the area of the mask. `limit` is what
the device could attain: the larger of FLOPs over its measured matmul rate and bytes over its
measured copy rate. Linear attention (`linear.py`) is compared with flash-linear-attention, the
plain parallel form, and softmax attention on the same tensors.

The program stops starting new rounds when its time is up, and prints its table last. On a GPU it
writes the results after each workload; on a CPU last, if the machine was steady.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from seqpar.kernels.flash_attention.configs import VARIANTS
from torch import Tensor
from torch.nn.attention import SDPBackend
from triton.runtime.errors import OutOfResources

from benchmarks import RESULTS
from benchmarks.kernels import figures
from benchmarks.kernels import softmax_contenders as contenders
from benchmarks.kernels.linear import Lightning
from benchmarks.kernels.softmax_workloads import Workload
from seqpar.bench import harness

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# bytes: shared memory of all multiprocessors, or second-level caches
ON_CHIP = 132 * 228 * 1024 if GPU else 2 * 2**20
BUFFERS = 3
HEAD_START = 2_000_000  # cycles, about a millisecond: what the host takes to launch a call
# relative error of a right answer: bf16 rounds inputs of the products
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def workloads() -> list[tuple[Workload | Lightning, torch.dtype]]:
    """Return what is computed on this device, in which dtype."""
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
    """Return the contenders by name, None where one cannot compute the workload."""
    if isinstance(work, Lightning):
        return work.field(DEVICE)
    mine = "triton" if GPU else "aten"
    made: dict[str, contenders.Attention | None] = {mine: contenders.ours(work, mine)}
    if GPU:
        made["one pass"] = contenders.ours(work, mine, deterministic=False)
        made |= {name: contenders.ours(work, mine, variant=name) for name in VARIANTS}
        made["FA2"] = contenders.sdpa(work, SDPBackend.FLASH_ATTENTION)
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
    """A contender on a workload: its calls, and the seconds that they took."""

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
        """Return what a forward holds at most beside its operands and its result."""
        q, k, v, _ = self.operands[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            out = self.attention(q, k, v)
        return torch.cuda.max_memory_allocated() - before - out.nbytes


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, on a GPU by its own clock and without the host's part.

    The GPU sleeps before the first event, so that all launches wait for it when it begins.
    """
    if not GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def device_rates() -> tuple[float, dict[torch.dtype, float]]:
    """Return bytes/s of a copy, counting both ways, and FLOP/s of a large product per dtype."""
    size, side = (2**30, 8192) if GPU else (2**27, 2048)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target, rates = torch.empty_like(source), {}
    copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(10))
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
        rates[dtype] = (
            2 * side**3 / statistics.median([seconds(lambda x=x, y=y: x @ y) for _ in range(8)][3:])
        )
    return 2 * size / copy, rates


def right(work: Workload | Lightning, dtype: torch.dtype, runner: Runner) -> dict[str, float]:
    """Return its errors; raise RuntimeError if they are not those of a right answer."""
    if runner.name in getattr(work, "others", ()):
        return {}
    q, k, v, dout = runner.operands[0]
    out = runner.attention(q, k, v)
    gradients = list(torch.autograd.grad(out, (q, k, v), dout)) if runner.has_backward else None
    errors = work.errors([x.detach() for x in runner.operands[0]], out.detach(), gradients)
    if not all(error <= BOUND[dtype] for error in errors.values()):
        raise RuntimeError(f"{runner.name} is wrong on {work.name}: {errors}")
    return errors


def measure(
    work: Workload | Lightning, dtype: torch.dtype, deadline: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield what each contender took, or why it was refused."""
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
        except (RuntimeError, OutOfResources) as error:  # wrong, or it cannot: shown as such
            if name in ("triton", "aten") and not isinstance(error, OutOfResources):
                raise
            yield {"contender": name, "refused": str(error).splitlines()[0][:200]}
            continue
        runners.append((runner, errors))
    for i in range(rounds):
        if i >= 3 and time.monotonic() > deadline:
            break
        for j in range(len(runners)):
            runners[(i + j) % len(runners)][0].turn(i % BUFFERS)
    for runner, errors in runners:
        times = {"forward": runner.forward, "backward": runner.backward}
        yield {
            "contender": runner.name,
            "errors": errors,
            "extra": runner.extra_bytes() if GPU else None,
            **times,
        }


def main() -> int:
    """Measure every workload, print the table, and write the result files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=480, help="start no round after so many")
    parser.add_argument("--rounds", type=int, default=30 if GPU else 11, help="at most, at least 3")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--no-write", action="store_true", help="print, and write no result files")
    options = parser.parse_args()
    began, results = time.monotonic(), []
    cases = [case for case in workloads() if options.only in case[0].name]
    # for the plain parallel form's far decays: with denormals it would take ten times as long
    torch.set_flush_denormal(True)
    before = 0.0 if GPU else harness.canary()
    copy_rate, matmul_rates = device_rates()
    rates = {"copy": copy_rate, **{str(dtype): rate for dtype, rate in matmul_rates.items()}}
    found: dict[str, Any] = {"rates": rates, "on_chip": ON_CHIP, "results": results}
    for i, (work, dtype) in enumerate(cases):
        deadline = began + options.seconds * (i + 1) / len(cases)
        if time.monotonic() > began + options.seconds:
            print(f"time is up: {len(cases) - i} workloads were left out")
            break
        name = f"{work.name} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
        print(f"{i + 1}/{len(cases)} {name}", flush=True)
        moved = work.bytes(dtype.itemsize, ON_CHIP)
        limit = max(work.flops / matmul_rates[dtype], moved / copy_rate)
        runs = list(measure(work, dtype, deadline, options.rounds))
        results.append({"workload": name, "flops": work.flops, "limit": limit, "runs": runs})
        if GPU and not options.no_write:  # what follows may not come to its end
            harness.write(RESULTS, "kernels", found)
    figures.table(results)
    if not GPU:
        try:
            found["canary_drift"] = harness.check_canary(before, harness.canary())
        except harness.UnsteadyError as refusal:
            print(f"refused: {refusal}")
            return 1
    if not options.no_write:
        path = harness.write(RESULTS, "kernels", found)
        figures.plot(results, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
