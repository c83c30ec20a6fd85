"""Find faster configurations for this device than the table's: `python -m seqpar.kernels.flash_attention.tune --dim 128`.

Times a few neighbours of each shipped configuration on a causal sequence, one kernel at a time, and keeps the fastest in
`configs.tuning_file()`, from where `configs.choose` takes it from the next process on. Nothing runs this but a user.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from . import backward_kv, backward_launches, backward_q, configs, delta, forward, forward_launches
from .configs import Config

UNLIMITED = 2**40


@dataclass
class Causal:
    """One causal document, as a slice table."""

    tokens: int

    def __post_init__(self) -> None:
        self.q_rows = self.k_rows = np.array([[0, self.tokens]])
        self.bands = np.array([[-UNLIMITED, 0]])
        self.q_positions = self.k_positions = np.arange(self.tokens, dtype=np.int32)


def neighbours(config: Config) -> Iterator[Config]:
    """The configuration itself, then some that differ in one respect."""
    yield config
    for columns in (config.columns // 2, config.columns * 2):
        if 16 <= columns <= 128:
            yield replace(config, columns=columns)
    for stages in (config.stages - 1, config.stages + 1):
        if stages >= 1:
            yield replace(config, stages=stages)
    if config.cut is None:
        yield replace(config, cut=(config.warps, config.stages))
    elif not config.specialise:
        yield replace(config, cut=None)
    if config.specialise:
        yield replace(config, specialise=False, warps=8)


def call(kind: str, config: Config, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    """The kernel on one causal document, ready to be timed."""
    slices, scale = Causal(q.shape[1]), q.shape[-1] ** -0.5
    separate, sizes = config.cut is not None, (config.rows, config.columns, q.device)
    out, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[:-1], dtype=torch.float32)
    if kind == "forward":
        partial_out, partial_lse = torch.empty_like(out, dtype=torch.float32), torch.empty_like(lse, dtype=torch.float64)
        (launches,) = forward_launches([slices], *sizes, separate)
        return lambda: forward(
            q, k, v, launches, config, out=out, lse=lse, partial_out=partial_out, partial_lse=partial_lse, scale=scale
        )
    launches = backward_launches(slices, *sizes, separate, kind == "backward_kv")
    operands = q, k, v, out, lse, delta(out, out, None)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    if kind == "backward_kv":
        return lambda: backward_kv(*operands, launches, config, dk=dk, dv=dv, scale=scale)
    return lambda: backward_q(*operands, launches, config, dq=dq, scale=scale)


def seconds(function: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median of a call, after one to compile."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def tune(dim: int, dtype: torch.dtype, device: torch.device, tokens: int, heads: int, repeats: int = 10) -> dict[str, Config]:
    """The fastest configuration of each kernel for this head dim and dtype; written to the tuning file."""
    q, k, v = (torch.randn(1, tokens, heads, dim, dtype=dtype, device=device) for _ in range(3))
    precision, width, best = "single" if dtype == torch.float32 else "half", max(64, configs.padded(dim)), {}
    for kind, shipped in zip(configs.KINDS, configs.TABLE[configs.architecture(device), precision, width], strict=True):
        times: dict[Config, float] = {}
        for config in neighbours(shipped):
            try:
                times[config] = seconds(call(kind, config, q, k, v), device, repeats)
                print(f"{kind}: {times[config] * 1e3:.3f} ms with {config}", flush=True)
            except Exception as error:  # it does not compile, or asks for more than the device has
                print(f"{kind}: {type(error).__name__} with {config}", flush=True)
        best[configs.tuning_key(kind, device, precision, width)] = min(times, key=times.__getitem__)
    file = configs.tuning_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text()) if file.is_file() else {}
    written = file.with_suffix(".new")
    written.write_text(json.dumps(known | {key: asdict(config) for key, config in best.items()}, indent=1) + "\n")
    written.replace(file)  # at once, whatever else reads it
    configs.tuned.cache_clear()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    device = torch.device("cuda", torch.cuda.current_device())
    for key, config in tune(arguments.dim, getattr(torch, arguments.dtype), device, arguments.tokens, arguments.heads).items():
        print(f"{key}: {config}")
    print(f"kept in {configs.tuning_file()}")


if __name__ == "__main__":
    main()
