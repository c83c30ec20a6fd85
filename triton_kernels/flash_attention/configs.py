"""How each kernel is launched: block sizes, warps and stages per (architecture, head dim, dtype), and the launch itself."""

from __future__ import annotations

import contextvars
import json
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

CACHE_BYTES = 50 * 2**20  # of keys and values that programs running together may share: about a second-level cache
KINDS = ("forward", "backward_kv", "backward_q")


@dataclass(frozen=True)
class Config:
    """`rows` is the size of a tile, `columns` of the blocks it walks (powers of two, at least 16).

    `tma`: full blocks are loaded by Hopper's tensor memory accelerator. `cut`: cut blocks get a launch of their own, with so
    many warps and stages. `specialise`: in the launch of the full blocks some warps load while others compute.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    tma: bool = False
    specialise: bool = False
    cut: tuple[int, int] | None = None

    def resources(self, has_cut: bool) -> tuple[int, int]:
        """(warps, stages) of a launch with cut blocks, or without."""
        return self.cut if has_cut and self.cut is not None else (self.warps, self.stages)


_SINGLE = {  # IEEE fp32 products run on the ordinary units: small tiles, whose operands fit the registers
    64: (Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    256: (Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(16, 16, 8, 1)),
}
_HALF = {
    "sm_80": {
        64: (Config(128, 64, 4, 3), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
        128: (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(128, 64, 8, 2)),
        256: (Config(64, 64, 8, 1), Config(64, 16, 8, 1), Config(64, 32, 8, 1)),
    },
    "sm_90": {
        64: (
            Config(128, 128, 4, 2, tma=True, specialise=True, cut=(8, 2)),
            Config(128, 32, 8, 3, tma=True, cut=(8, 2)),
            Config(128, 128, 8, 2, tma=True),
        ),
        128: (
            Config(128, 64, 4, 3, tma=True, specialise=True, cut=(8, 2)),
            Config(128, 32, 8, 3, tma=True, cut=(8, 2)),
            Config(128, 64, 8, 2, tma=True),
        ),
        256: (
            Config(64, 32, 8, 2, cut=(8, 3)),
            Config(32, 32, 8, 2, tma=True),
            Config(64, 32, 8, 2, tma=True),
        ),
    },
    "gfx942": {
        64: (Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(128, 64, 4, 1)),
        128: (Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(128, 32, 4, 1)),
        256: (Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    },
}
Row = tuple[Config, Config, Config]
# (architecture, "half" or "single" precision, padded head dim) -> the configurations of KINDS
TABLE: dict[tuple[str, str, int], Row] = {
    **{(name, "half", width): row for name, rows in _HALF.items() for width, row in rows.items()},
    **{(name, "single", width): row for name in _HALF for width, row in _SINGLE.items()},
    **{("interpreter", p, width): (Config(32, 32, 4, 1),) * 3 for p in ("half", "single") for width in _SINGLE},
}


def architecture(device: torch.device) -> str:
    """The table's name for a device: its own where it has one, else the nearest that runs on it."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(device)[0] == 9 else "sm_80"


def padded(dim: int) -> int:
    """A head dim as the kernels see it: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


def choose(kind: str, q: Tensor, v: Tensor) -> Config:
    """The configuration of a kernel for queries (B, T, H, D) and values (B, Tk, Hkv, Dv): tuned, or the table's."""
    width = max(64, padded(q.shape[-1]), padded(v.shape[-1]))
    precision = "single" if q.dtype == torch.float32 else "half"
    shipped = TABLE[architecture(q.device), precision, width][KINDS.index(kind)]
    return tuned().get(tuning_key(kind, q.device, precision, width), shipped)


def tuning_key(kind: str, device: torch.device, precision: str, width: int) -> str:
    """What a tuned configuration holds for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return f"{name}, triton {triton.__version__}, {precision}, {width}, {kind}"


def tuning_file() -> Path:
    """Where `tune` keeps what it found: $SEQPAR_CACHE, or ~/.cache/seqpar, in flash_attention.json."""
    return Path(os.environ.get("SEQPAR_CACHE", "~/.cache/seqpar")).expanduser() / "flash_attention.json"


@cache
def tuned() -> dict[str, Config]:
    """Configurations found by `tune`, read once in a process."""
    file = tuning_file()
    found = json.loads(file.read_text()) if file.is_file() else {}
    return {key: Config(**fields | {"cut": fields["cut"] and tuple(fields["cut"])}) for key, fields in found.items()}


def prepare(config: Config, *operands: Tensor) -> tuple[list[Tensor], bool]:
    """Operands (B, T, H, D) that the kernels can address, and whether by tensor descriptors.

    Copied are those whose tiles span 2**31 elements, and those that only their strides keep from having a descriptor.
    """
    ready = []
    for x in operands:
        far = max(x.stride(1), x.stride(3)) * 256 >= 2**31
        awkward = config.tma and not has_descriptor(x) and x.shape[3] * x.element_size() % 16 == 0
        ready.append(x.contiguous() if far or awkward else x)
    return ready, config.tma and all(map(has_descriptor, ready))


def has_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can stand for x: rows contiguous, and all else a positive multiple of 16 bytes."""
    strides = [s * x.element_size() for s in x.stride()[0 if x.shape[0] > 1 else 1 : 3]]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)


def head_block(x: Tensor, y: Tensor, group: int, heads: int) -> int:
    """How many of all `heads` run together: as many, in groups that share x and y (B, T, H, D), as these fit the cache."""
    per_group = max(1, x.shape[1] * (x.shape[3] + y.shape[3]) * x.element_size())
    return min(heads, max(1, CACHE_BYTES // per_group) * group)


def constants(config: Config, dim: int, value_dim: int, dtype: torch.dtype, tma: bool) -> dict[str, Any]:
    """The kernels' compile-time arguments that follow from the configuration and the operands."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {
        "D": dim, "DV": value_dim, "BLOCK_D": padded(dim), "BLOCK_DV": padded(value_dim),
        "ROWS": config.rows, "COLUMNS": config.columns, "TMA": tma,
        "PRECISION": "tf32" if dtype != torch.float32 or tf32 else "ieee",
    }  # fmt: skip


def scoring(scale: float, softcap: float) -> tuple[float, float]:
    """The kernels' `scale` and `cap`: scores are scale · q·k, or cap · tanh(scale · q·k), in units of log2."""
    log2_e = 1 / math.log(2)
    return (abs(scale) / softcap, softcap * log2_e) if softcap else (abs(scale) * log2_e, 0.0)


def run(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: Sequence[Any],
    flags: dict[str, Any],
    warps: int,
    stages: int,
) -> None:
    """Launch, with memory for tensor descriptors from torch's allocator (the caller's own setting stays as it was)."""

    def launch() -> None:
        if flags.get("TMA"):
            triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
        kernel[grid](*arguments, **flags, num_warps=warps, num_stages=stages)

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        contextvars.copy_context().run(launch)
