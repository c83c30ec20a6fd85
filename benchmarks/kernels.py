"""Our attention kernels against those that users have: on a GPU the backend "triton", on a CPU "aten".

Each contender is first checked against fp64 on sampled rows. Then all take turns, round after round, on random data in
rotated buffers, forward and backward apart; figures are medians. TFLOP/s count the area of the mask. `limit` is what the
device could attain: the larger of FLOPs over its measured matmul rate and bytes over its measured copy rate. Linear attention
(`lightning.py`) is compared with flash-linear-attention, the plain parallel form, and softmax attention on the same tensors.

`python benchmarks/kernels.py [--seconds 480]` stops starting new rounds when the time is up, and prints its table last.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import contenders
import harness
import torch
from lightning import Lightning
from torch import Tensor
from torch.nn.attention import SDPBackend
from workloads import Workload

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ON_CHIP = 132 * 228 * 1024 if GPU else 2 * 2**20  # bytes: shared memory of all multiprocessors, or second-level caches
BUFFERS = 3
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative error of a right answer: bf16 rounds inputs of the products


def workloads() -> list[tuple[Workload | Lightning, torch.dtype]]:
    if not GPU:
        shapes = [("causal", {}), ("full", {}), ("window", {"window": 256}), ("packed", {"mean_document": 256})]
        made: list[Workload | Lightning] = [Workload(kind, 4096, 8, 8, 64, **options) for kind, options in shapes]
        made.append(Workload("packed", 8192, 8, 8, 64, mean_document=512))
        made.append(Workload("ring step", 2048, 8, 8, 64))
        made += [Lightning(tokens, 8, 64) for tokens in (2048, 4096, 8192)]
        return [(work, dtype) for work in made for dtype in (torch.float32, torch.bfloat16)]
    made = [Lightning(2**n, 16, 128) for n in range(11, 21)]
    for dim, (heads, kv_heads) in itertools.product((128, 64), ((64, 8), (16, 16))):
        for tokens in [2**n * 1024 for n in range(1, 7)] if heads == 64 else [8192, 32768]:
            batch = max(1, 16384 // tokens)
            made += [Workload(kind, tokens, heads, kv_heads, dim, batch) for kind in ("causal", "full")]
        made += [Workload(kind, 65536, heads, kv_heads, dim) for kind in ("packed", "window", "fused shards")]
        made.append(Workload("ring step", 16384, heads, kv_heads, dim))
    made.append(Workload("full", 65536, 1, 1, 128))
    made.append(Workload("full", 65536, 32, 32, 128))
    return [(work, torch.bfloat16) for work in made]


def field_of(work: Workload | Lightning) -> dict[str, contenders.Attention | None]:
    """The contenders, by name; None where one cannot compute the workload."""
    if isinstance(work, Lightning):
        return work.field(DEVICE)
    mine = "triton" if GPU else "aten"
    made: dict[str, contenders.Attention | None] = {mine: contenders.ours(work, mine)}
    if GPU:
        made["one pass"] = contenders.ours(work, mine, deterministic=False)
        made["FA2"] = contenders.sdpa(work, SDPBackend.FLASH_ATTENTION)
        made["cuDNN"] = contenders.sdpa(work, SDPBackend.CUDNN_ATTENTION)
        made["FA4"] = contenders.flash_attention_4(work)
        made["flex"] = contenders.flex(work, DEVICE) if work.tokens in (8192, 65536) and work.heads == 64 else None
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
        q, k, v, dout = self.operands[buffer]
        with torch.no_grad():
            self.forward.append(seconds(lambda: self.attention(q, k, v)))
        if self.has_backward:
            out = self._graphs[buffer]
            self.backward.append(seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)))

    def extra_bytes(self) -> int:
        """What a forward holds at most beside its operands and its result."""
        q, k, v, _ = self.operands[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            out = self.attention(q, k, v)
        return torch.cuda.max_memory_allocated() - before - out.nbytes


def seconds(call: Callable[[], object]) -> float:
    if not GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def device_rates() -> tuple[float, dict[torch.dtype, float]]:
    """(bytes/s of a copy, counting both ways, FLOP/s of a large product per dtype)."""
    size, side = (2**30, 8192) if GPU else (2**27, 2048)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target, rates = torch.empty_like(source), {}
    copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(10))
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / statistics.median([seconds(lambda x=x, y=y: x @ y) for _ in range(8)][3:])
    return 2 * size / copy, rates


def right(work: Workload | Lightning, dtype: torch.dtype, runner: Runner) -> dict[str, float]:
    """Its errors; a RuntimeError if they are not those of a right answer."""
    if runner.name in getattr(work, "others", ()):
        return {}
    q, k, v, dout = runner.operands[0]
    out = runner.attention(q, k, v)
    gradients = list(torch.autograd.grad(out, (q, k, v), dout)) if runner.has_backward else None
    errors = work.errors([x.detach() for x in runner.operands[0]], out.detach(), gradients)
    if not all(error <= BOUND[dtype] for error in errors.values()):
        raise RuntimeError(f"{runner.name} is wrong on {work.name}: {errors}")
    return errors


def measure(work: Workload | Lightning, dtype: torch.dtype, deadline: float, rounds: int) -> Iterator[dict[str, Any]]:
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
        except RuntimeError as error:  # a peer that is wrong, or cannot: it is shown as such
            if name in ("triton", "aten"):
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
        yield {"contender": runner.name, "errors": errors, "extra": runner.extra_bytes() if GPU else None, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rounds", type=int, default=30 if GPU else 11)
    arguments = parser.parse_args()
    began, cases, results = time.monotonic(), workloads(), []
    torch.set_flush_denormal(True)  # the plain parallel form's far decays: with them it would take ten times as long
    before = None if GPU else harness.canary()
    copy_rate, matmul_rates = device_rates()
    for i, (work, dtype) in enumerate(cases):
        deadline = began + arguments.seconds * (i + 1) / len(cases)
        if time.monotonic() > began + arguments.seconds:
            print(f"time is up: {len(cases) - i} workloads were left out")
            break
        print(f"{i + 1}/{len(cases)} {work.name} {dtype}", flush=True)
        limit = max(work.flops / matmul_rates[dtype], work.bytes(dtype.itemsize, ON_CHIP) / copy_rate)
        runs = list(measure(work, dtype, deadline, arguments.rounds))
        name = f"{work.name} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
        results.append({"workload": name, "flops": work.flops, "limit": limit, "runs": runs})
    rates = {"copy": copy_rate, **{str(dtype): rate for dtype, rate in matmul_rates.items()}}
    found = {"rates": rates, "on_chip": ON_CHIP, "results": results}
    after = None if GPU else harness.canary()
    table(results)
    if before is not None and after is not None:
        found["canary_drift"] = harness.check_canary(before, after)
    path = harness.write(f"{harness.device_slug()}/kernels", found)
    plot(results, path.with_suffix(".png"))


def table(results: list[dict[str, Any]]) -> None:
    """TFLOP/s by area, forward and backward; the ratio of ours to each peer; and ours against the attainable limit."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("workload", "contender", "forward", "backward", "ours ÷ it", "backward", "of limit")
    for result in results:
        best = next(run for run in result["runs"] if run["contender"] in ("triton", "aten"))
        for run in result["runs"]:
            if "refused" in run:
                shown.add_row(result["workload"], run["contender"], "refused", "", "", "", run["refused"][:40])
                continue
            forward, backward = (statistics.median(run[x]) if run[x] else math.nan for x in ("forward", "backward"))
            rate, back_rate = result["flops"] / forward / 1e12, 2.5 * result["flops"] / backward / 1e12
            ratios = forward / statistics.median(best["forward"]), backward / statistics.median(best["backward"])
            cells = [f"{x:.3g}" if x == x else "" for x in (rate, back_rate, *ratios, result["limit"] / forward)]
            shown.add_row(result["workload"], run["contender"], *cells)
    Console(width=120).print(shown)


def plot(results: list[dict[str, Any]], path: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({run["contender"] for result in results for run in result["runs"] if "refused" not in run})
    figure, axes = plt.subplots(2, 1, figsize=(max(8, 0.6 * len(results)), 8), sharex=True, layout="constrained")
    for axis, direction, factor in zip(axes, ("forward", "backward"), (1.0, 2.5), strict=True):
        for i, name in enumerate(names):
            rates = []
            for result in results:
                times = next((run[direction] for run in result["runs"] if run["contender"] == name and direction in run), [])
                rates.append(factor * result["flops"] / statistics.median(times) / 1e12 if times else 0.0)
            axis.bar([j + 0.8 * i / len(names) for j in range(len(results))], rates, 0.8 / len(names), label=name)
        axis.set_ylabel(f"{direction}, TFLOP/s by mask area")
    axes[1].set_xticks([j + 0.4 for j in range(len(results))], [r["workload"] for r in results], rotation=60, ha="right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
