"""Print in 90 seconds how fast softmax attention is, or which backend is the best for each call.

    python -m benchmarks.kernels.quick             # the default and other libraries' kernels
    python -m benchmarks.kernels.quick --backends  # the default and every backend, by kind of call

All contenders are first checked forward and backward against fp64 with head dim 128. Then rounds
interleave the contenders on one workload after another. TFLOP/s are of the median, and the ratio is
the default over the best. Deterministic backwards are slower: "default" is deterministic, "not
det." is the default with deterministic=False, "FA4 det." and "FA4" are FlashAttention-4 with and
without, and the backwards of FlashAttention-2 and cuDNN are not deterministic. Without a GPU the
workloads are tiny. It writes no files, and exits with 1 if the default is wrong or a workload is
left when the time is up.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch.nn.attention import SDPBackend

from benchmarks import harness
from benchmarks.kernels import softmax_contenders as contenders
from benchmarks.kernels.device import DEVICE, GPU
from benchmarks.kernels.run import Runner, right
from benchmarks.kernels.softmax_workloads import Workload
from seqpar.attention.backend import BACKENDS, DEFAULT

BACKWARD = 2.5  # FLOPs of a backward, over those of its forward
NOT_DETERMINISTIC = "default, not det."  # its column shows what lies behind the comma
DTYPE = torch.bfloat16 if GPU else torch.float32
Field = Callable[[Workload], dict[str, contenders.Attention | None]]


def workloads(by_backend: bool) -> list[Workload]:
    """Return the workloads of the table; by backend, one for each kind of call."""
    if not GPU:
        kinds = ("causal", "window", "packed") if by_backend else ("causal", "packed")
        return [Workload(x, 256, 2, 1, 16, window=64, mean_document=64) for x in kinds]
    causal = [Workload("causal", 8192, 32, 8, 128), Workload("causal", 32768, 32, 8, 128)]
    others = [Workload("ring step", 16384, 32, 8, 128), Workload("packed", 65536, 32, 8, 128)]
    if not by_backend:
        return causal + others
    dims = [Workload("causal", 8192, 16, 16, dim) for dim in (64, 192, 248, 256)]
    softcap = Workload("causal", 8192, 32, 8, 128, softcap=50.0)
    return [*causal[:1], *others, Workload("window", 65536, 32, 8, 128), *dims, softcap]


def libraries(work: Workload) -> dict[str, contenders.Attention | None]:
    """Return the default and the kernels of other libraries; None for one that is missing."""
    default = {
        DEFAULT: contenders.ours(work, DEFAULT),
        NOT_DETERMINISTIC: contenders.ours(work, DEFAULT, deterministic=False),
    }
    if not GPU:
        return default | {"SDPA": contenders.sdpa(work, None)}
    return default | {
        "triton": contenders.ours(work, "triton"),
        "FA4": contenders.flash_attention_4(work),
        "FA4 det.": contenders.flash_attention_4(work, deterministic=True),
        "FA2": contenders.flash_attention_2(work),
        "cuDNN": contenders.sdpa(work, SDPBackend.CUDNN_ATTENTION),
    }


def backends(work: Workload) -> dict[str, contenders.Attention | None]:
    """Return the default, every backend but the reference, and the kernels of other libraries."""
    names = [DEFAULT, *(name for name in BACKENDS["softmax"] if name != "reference")]
    usable = names if GPU else [DEFAULT, "aten"]
    found = {name: contenders.ours(work, name) for name in usable}
    if work.softcap:
        return found
    return found | libraries(work)


def runners(work: Workload, field: Field, excluded: Iterable[str] = ()) -> list[Runner]:
    """Return the contenders that are here and not excluded, with operands."""
    operands = work.operands(DTYPE, DEVICE, 0)
    for x in operands[:3]:
        x.requires_grad_()
    made = []
    for name, attention in field(work).items():
        if attention is None or name in excluded:
            continue
        try:
            made.append(Runner(name, attention, [operands], True))
        except Exception as error:  # a kernel that cannot compute the workload
            print(f"  {name}: {_first_line(error)}", flush=True)
    return made


def check(field: Field) -> list[str]:
    """Print the errors of all contenders, and return the names of those that are wrong or fail."""
    work, correct = Workload("causal", 1024 if GPU else 128, 4, 2, 128), []
    print(f"relative errors against fp64: {work.kind} {work.tokens} d{work.dim}, {DTYPE}")
    for runner in runners(work, field):
        try:
            errors = right(work, DTYPE, runner)
            shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            correct.append(runner.name)
        except Exception as error:
            shown = _first_line(error)
        print(f"  {runner.name:18s}{shown}", flush=True)
    return [name for name, x in field(work).items() if x is not None and name not in correct]


def rows(work: Workload, made: list[Runner], rounds: int) -> list[str]:
    """Return a line for forward and one for backward: TFLOP/s of all, and the first over the best.

    A contender that fails in a round has no figure.
    """
    for number, runner in harness.turns(made, rounds):
        try:
            if len(runner.forward) == len(runner.backward) == number:
                runner.turn(0)
        except Exception as error:
            print(f"  {runner.name}: {_first_line(error)}", flush=True)
    lines, label = [], f"{work.kind} {work.tokens} {work.heads}:{work.kv_heads} d{work.dim}"
    label += " softcap" * (work.softcap > 0)
    for way, factor in (("forward", 1.0), ("backward", BACKWARD)):
        rates = {
            x.name: factor * work.flops / statistics.median(getattr(x, way)) / 1e12
            for x in made
            if len(x.backward) == rounds
        }
        best = max(rates, key=rates.__getitem__, default="")
        cells = [f"{rates.get(x.name, float('nan')):10.3g}" for x in made]
        ratio = rates.get(made[0].name, float("nan")) / rates[best] if rates else float("nan")
        lines.append(f"{label:32s}{way:9s}{''.join(cells)}{ratio:8.2f}  {best}")
    return lines


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:150]


ARGUMENTS = {
    "--backends": (False, "compare backends, by kind of call"),
    "--seconds": (80.0, "start no workload after these"),
    "--rounds": 7,
}


def main() -> int:
    options = harness.arguments_of(__doc__, ARGUMENTS)
    began, field = time.monotonic(), backends if options.backends else libraries
    wrong = check(field)
    works = workloads(options.backends)
    names: list[str] = []
    left = 0
    print("\nTFLOP/s, and the first contender over the best", flush=True)
    for work in works:
        if time.monotonic() > began + options.seconds:
            left += 1
            continue
        made = runners(work, field, wrong)
        if [x.name for x in made] != names:
            names = [x.name for x in made]
            print(f"{'':41s}{''.join(f'{name[-9:]:>10s}' for name in names)}   ratio  best")
        print("\n".join(rows(work, made, options.rounds)), flush=True)
    if left:
        print(f"time is up: {left} workloads were left out")
    return int(bool(left or {DEFAULT, NOT_DETERMINISTIC} & {*wrong}))


if __name__ == "__main__":
    sys.exit(main())
