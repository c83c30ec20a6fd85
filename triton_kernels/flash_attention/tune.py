"""Find configurations of kernels that are faster on this device than the shipped configurations.

`python -m seqpar.kernels.flash_attention.tune --dim 128` times candidates on a causal sequence, one
kernel at a time. It writes the fastest configurations to `configs.tuning_file()`. Processes that
start later use these configurations (`configs.choose`). Only users run this program.

Candidates are the shipped configuration, its variants, and the configurations in candidates.json.
The configurations in candidates.json were compiled ahead of time, and none of the launches that are
timed spilled registers in loops. If candidates.json has no configuration for an architecture, dtype
and head dim, candidates are a few configurations that differ from the shipped one in one respect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from ..checks import check_dim
from . import (
    backward_kv,
    backward_launches,
    backward_q,
    configs,
    delta,
    empty_partial,
    forward,
    forward_launches,
)
from .configs import Config

FILE = Path(__file__).with_name("candidates.json")
UNLIMITED = 2**40


@dataclass
class Causal:
    """One causal document, as a slice table."""

    tokens: int

    def __post_init__(self) -> None:
        self.q_rows = self.k_rows = np.array([[0, self.tokens]])
        self.bands = np.array([[-UNLIMITED, 0]])
        self.q_positions = self.k_positions = np.arange(self.tokens, dtype=np.int32)


def candidates(name: str, precision: str, width: int, kind: str) -> list[Config]:
    """Return the configurations to time, beginning with the shipped configuration and its variants.

    If the file has no section for the version of Triton, the section of the newest version is used.
    """
    shipped: Config = getattr(configs.TABLE[name, precision, width], kind)
    sections = json.loads(FILE.read_text())
    section = sections.get(triton.__version__) or sections[max(sections)]
    key = {"architecture": name, "precision": precision, "width": width, "kind": kind}
    compiled = [
        configs.from_fields(row["config"]) for row in section["rows"] if key.items() <= row.items()
    ]
    variants = [configs.varied(shipped, variant) for variant in configs.VARIANTS]
    return list(dict.fromkeys([shipped, *variants, *(compiled or neighbours(shipped))]))


def neighbours(config: Config) -> Iterator[Config]:
    """Yield configurations that differ in one respect."""
    for columns in (config.block_columns // 2, config.block_columns * 2):
        if 16 <= columns <= 128:
            yield replace(config, block_columns=columns)
    for stages in (config.stages - 1, config.stages + 1):
        if stages >= 1:
            yield replace(config, stages=stages)
    if config.cut_resources is None:
        yield replace(config, cut_resources=(config.warps, config.stages))
    else:
        yield replace(config, cut_resources=None)
    yield replace(config, tma=not config.tma)


def call(kind: str, config: Config, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    """Return a launch of the kernel `kind` on one causal document, ready to be timed."""
    slices, scale = Causal(q.shape[1]), q.shape[-1] ** -0.5
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    if kind == "forward":
        partial_out, partial_lse = empty_partial(q, v.shape[-1])
        (launches,) = forward_launches([slices], config, q.device)
        return lambda: forward(
            q,
            k,
            v,
            launches,
            config,
            out=out,
            lse=lse,
            partial_out=partial_out,
            partial_lse=partial_lse,
            scale=scale,
        )
    launches = backward_launches(slices, config, q.device, kind == "backward_kv")
    operands = q, k, v, out, lse, delta(out, out, None)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    if kind == "backward_kv":
        return lambda: backward_kv(*operands, launches, config, dk=dk, dv=dv, scale=scale)
    return lambda: backward_q(*operands, launches, config, dq=dq, scale=scale)


def seconds(function: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call, after a first call that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def tune(
    dim: int, dtype: torch.dtype, device: torch.device, tokens: int, heads: int, repeats: int = 10
) -> dict[str, Config]:
    """Return the fastest configuration of each kernel for this head dim and dtype, by tuning key.

    Each configuration is added to the tuning file as soon as it is found.
    """
    check_dim("dim", dim)
    q, k, v = (torch.randn(1, tokens, heads, dim, dtype=dtype, device=device) for _ in range(3))
    precision = "single" if dtype == torch.float32 else "half"
    width = configs.width_of(dim)
    name = configs.architecture(device)
    best = {}
    for kind in configs.KernelConfigs._fields:
        times: dict[Config, float] = {}
        for config in candidates(name, precision, width, kind):
            try:
                times[config] = seconds(call(kind, config, q, k, v), device, repeats)
                print(f"{kind}: {times[config] * 1e3:.3f} ms with {config}", flush=True)
            except (
                Exception
            ) as error:  # the candidate does not compile, or needs more than the device has
                print(f"{kind}: {type(error).__name__} with {config}", flush=True)
        key = configs.tuning_key(kind, device, precision, width)
        best[key] = min(times, key=times.__getitem__)
        _keep(key, best[key])
    configs.forget()
    return best


def _keep(key: str, config: Config) -> None:
    file = configs.tuning_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text()) if file.is_file() else {}
    written = file.with_suffix(".new")
    written.write_text(json.dumps(known | {key: asdict(config)}, indent=1) + "\n")
    written.replace(file)  # atomically, for concurrent readers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif triton.knobs.runtime.interpret:  # a test of this program
        device = torch.device("cpu")
    else:
        parser.error("there is no GPU to tune for")
    dtype = getattr(torch, arguments.dtype)
    sizes = arguments.tokens, arguments.heads, arguments.repeats
    found = tune(arguments.dim, dtype, device, *sizes)
    for key, config in found.items():
        print(f"{key}: {config}")
    print(f"kept in {configs.tuning_file()}")


if __name__ == "__main__":
    main()
