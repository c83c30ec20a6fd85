"""How each kernel is launched, and the launch itself.

Sizes of tiles, warps and stages depend on architecture, precision and head dim.
"""

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
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..checks import check_kind, check_operand

# Programs that run together may share so many bytes of keys and values: about a second-level cache.
CACHE_BYTES = 50 * 2**20


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: the sizes of its tiles, and its warps and stages.

    A tile has `tile_rows` rows and walks blocks of `block_columns` columns: powers of two, at least
    16. With `tma`, full blocks are loaded by Hopper's tensor memory accelerator. With `specialise`,
    in the launch of the full blocks some warps load while others compute. With `cut_resources`
    (warps, stages), cut blocks get a launch of their own, which has so many.
    """

    tile_rows: int
    block_columns: int
    warps: int
    stages: int
    tma: bool = False
    specialise: bool = False
    cut_resources: tuple[int, int] | None = None

    @property
    def separate(self) -> bool:
        """Whether full and cut blocks get a launch each."""
        return self.cut_resources is not None

    def resources(self, has_cut: bool) -> tuple[int, int]:
        """Return (warps, stages) of a launch with cut blocks, or without."""
        if has_cut and self.cut_resources is not None:
            return self.cut_resources
        return self.warps, self.stages


class KernelConfigs(NamedTuple):
    """The configurations of the kernels for one architecture, precision and head dim."""

    forward: Config
    backward_kv: Config
    backward_q: Config


# IEEE fp32 products run on the ordinary units: small tiles, whose operands fit the registers.
_SINGLE = {
    64: KernelConfigs(Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: KernelConfigs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    256: KernelConfigs(Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(16, 16, 8, 1)),
}
_HALF = {
    "sm_80": {
        64: KernelConfigs(Config(128, 64, 4, 3), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
        128: KernelConfigs(Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(128, 64, 8, 2)),
        256: KernelConfigs(Config(64, 64, 8, 1), Config(64, 16, 8, 1), Config(64, 32, 8, 1)),
    },
    "sm_90": {
        64: KernelConfigs(
            Config(128, 128, 4, 2, tma=True, specialise=True, cut_resources=(8, 2)),
            Config(128, 32, 8, 3, tma=True, cut_resources=(8, 2)),
            Config(128, 128, 8, 2, tma=True),
        ),
        128: KernelConfigs(
            Config(128, 64, 4, 3, tma=True, specialise=True, cut_resources=(8, 2)),
            Config(128, 32, 8, 3, tma=True, cut_resources=(8, 2)),
            Config(128, 64, 8, 2, tma=True),
        ),
        256: KernelConfigs(
            Config(64, 32, 8, 2, cut_resources=(8, 3)),
            Config(32, 32, 8, 2, tma=True),
            Config(64, 32, 8, 2, tma=True),
        ),
    },
    "gfx942": {
        64: KernelConfigs(Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(128, 64, 4, 1)),
        128: KernelConfigs(Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(128, 32, 4, 1)),
        256: KernelConfigs(Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    },
}
# (architecture, "half" or "single" precision, padded head dim of at least 64) -> configurations
TABLE: dict[tuple[str, str, int], KernelConfigs] = {}
for _name, _by_width in _HALF.items():
    TABLE |= {(_name, "half", width): configs for width, configs in _by_width.items()}
    TABLE |= {(_name, "single", width): configs for width, configs in _SINGLE.items()}
for _width in _SINGLE:
    for _precision in ("half", "single"):
        TABLE["interpreter", _precision, _width] = KernelConfigs(*[Config(32, 32, 4, 1)] * 3)


def architecture(device: torch.device) -> str:
    """Return the name that the table has for a device.

    It is its own where the table has it, else that of the nearest architecture which runs on it.
    """
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(device)[0] == 9 else "sm_80"


def padded(dim: int) -> int:
    """Return a head dim as the kernels see it: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


def choose(kind: str, q: Tensor, v: Tensor) -> Config:
    """Return the configuration of the kernel `kind`, a field of `KernelConfigs`.

    It is the tuned one, or else the one of the table. It depends on the device, the dtype and the
    head dims of queries (B, T, H, D) and values (B, Tk, Hkv, Dv).
    """
    check_kind(kind, KernelConfigs._fields)
    check_operand("q", q)
    check_operand("v", v)
    width = max(64, padded(q.shape[-1]), padded(v.shape[-1]))
    precision = "single" if q.dtype == torch.float32 else "half"
    shipped: Config = getattr(TABLE[architecture(q.device), precision, width], kind)
    return tuned().get(tuning_key(kind, q.device, precision, width), shipped)


def tuning_key(kind: str, device: torch.device, precision: str, width: int) -> str:
    """Return what a tuned configuration holds for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return f"{name}, triton {triton.__version__}, {precision}, {width}, {kind}"


def tuning_file() -> Path:
    """Return the file in which `tune` keeps what it found.

    It is flash_attention.json in $SEQPAR_CACHE, or else in ~/.cache/seqpar.
    """
    folder = Path(os.environ.get("SEQPAR_CACHE", "~/.cache/seqpar")).expanduser()
    return folder / "flash_attention.json"


@cache
def tuned() -> dict[str, Config]:
    """Return the configurations that `tune` found by their keys, read once in a process.

    Those of a version of the library whose configurations had other fields are left out.
    """
    file = tuning_file()
    found = json.loads(file.read_text()) if file.is_file() else {}
    configs = {}
    for key, fields in found.items():
        if fields.keys() == Config.__dataclass_fields__.keys():
            resources = fields["cut_resources"]
            configs[key] = Config(**fields | {"cut_resources": resources and tuple(resources)})
    return configs


def prepare(config: Config, *operands: Tensor) -> tuple[list[Tensor], bool]:
    """Return operands (B, T, H, D) that the kernels can address, and whether by tensor descriptors.

    Copied are those whose tiles span 2**31 elements, and those that only their strides keep from
    having a descriptor.
    """
    ready = []
    for x in operands:
        far = max(x.stride(1), x.stride(3)) * 256 >= 2**31
        full_lines = x.shape[3] * x.element_size() % 16 == 0  # a copy has a descriptor
        copied = far or (config.tma and full_lines and not has_descriptor(x))
        ready.append(x.contiguous() if copied else x)
    return ready, config.tma and all(map(has_descriptor, ready))


def has_descriptor(x: Tensor) -> bool:
    """Return whether a tensor descriptor can stand for x (B, T, H, D).

    Its rows must be contiguous, and its address and other strides positive multiples of 16 bytes.
    """
    strides = [s * x.element_size() for s in x.stride()[0 if x.shape[0] > 1 else 1 : 3]]
    return (
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)
    )


def head_block(x: Tensor, y: Tensor, group: int, heads: int) -> int:
    """Return how many of all `heads` run together, those of the batch counted too.

    As many do as the cache holds the keys and values of. A `group` of heads shares a head of x (B,
    T, H, D) and y (B, T, H, Dv).
    """
    per_group = max(1, x.shape[1] * (x.shape[3] + y.shape[3]) * x.element_size())
    return min(heads, max(1, CACHE_BYTES // per_group) * group)


def constants(
    config: Config, dim: int, value_dim: int, dtype: torch.dtype, tma: bool
) -> dict[str, Any]:
    """Return the kernels' compile-time arguments that follow from configuration and operands."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {
        "D": dim, "DV": value_dim, "BLOCK_D": padded(dim), "BLOCK_DV": padded(value_dim),
        "TILE_ROWS": config.tile_rows, "BLOCK_COLUMNS": config.block_columns, "TMA": tma,
        "PRECISION": "tf32" if dtype != torch.float32 or tf32 else "ieee",
    }  # fmt: skip


def scoring(scale: float, softcap: float) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, in units of log2.

    Scores are scale · q·k, or with a softcap cap · tanh(scale · q·k).
    """
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
    """Launch a kernel with positional `arguments` and compile-time `flags`.

    Memory for tensor descriptors comes from torch's allocator; the caller's own setting stays as it
    was.
    """

    def launch() -> None:
        if flags.get("TMA"):
            triton.set_allocator(
                lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device)
            )
        kernel[grid](*arguments, **flags, num_warps=warps, num_stages=stages)

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        contextvars.copy_context().run(launch)
