"""Configurations of the kernels: sizes of tiles, warps and stages.

The configuration of a kernel depends on the architecture, the precision and the head dim.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..checks import check_kind, check_operand
from ..gpus import gpu_of


@dataclass(frozen=True)
class Config:
    """The sizes of a kernel's tiles and blocks, and its numbers of warps and stages.

    A tile has `tile_rows` rows, and is computed over blocks of `block_columns` columns. Both
    numbers are powers of two, and at least 16. A block is *full* if all rows of the tile attend to
    all of its columns. All other blocks are *cut*. With `tma`, Hopper's tensor memory accelerator
    loads full blocks. With `cut_resources` (warps, stages), cut blocks are computed by a separate
    launch with these numbers of warps and stages. With `host`, the host makes the tensor
    descriptors. Without `host`, each program makes them.
    """

    tile_rows: int
    block_columns: int
    warps: int
    stages: int
    tma: bool = False
    cut_resources: tuple[int, int] | None = None
    host: bool = False

    def __hash__(self) -> int:
        return self._hash  # computed once, since each call looks up its configuration

    def __getstate__(self) -> dict[str, Any]:
        # The hash is left out, since it differs from process to process.
        return {name: x for name, x in vars(self).items() if name != "_hash"}

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @property
    def separate(self) -> bool:
        """Whether full blocks and cut blocks have separate launches."""
        return self.cut_resources is not None

    def described(self, has_full: bool, descriptors: bool, from_host: bool) -> str:
        """Return who makes the tensor descriptors of full blocks: "host", "device" or "" for
        nobody.

        The arguments say whether a launch has full blocks, whether the operands can have
        descriptors, and whether the host could make the descriptors.
        """
        if not (self.tma and has_full and descriptors):
            return ""
        return "host" if self.host and from_host else "device"

    def resources(self, has_cut: bool) -> tuple[int, int]:
        """Return (warps, stages) of a launch, which depend on whether it has cut blocks."""
        if has_cut and self.cut_resources is not None:
            return self.cut_resources
        return self.warps, self.stages


# Changes to configurations, by name, that may be faster on Hopper; no GPU has tested them yet.
VARIANTS: dict[str, dict[str, Any]] = {"host descriptors": {"host": True}}


NO_DESCRIPTORS = ", no descriptors"  # suffix of the name of an architecture


class KernelConfigs(NamedTuple):
    """The configurations of the kernels for one architecture, precision and head dim."""

    forward: Config
    backward_kv: Config
    backward_q: Config


# Configurations of widths 96 and 192 were compiled so that no registers spill in loops. No GPU has
# measured them.
# IEEE fp32 products run on the ordinary units: small tiles, whose operands fit the registers.
_SINGLE = {
    64: KernelConfigs(Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    96: KernelConfigs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    128: KernelConfigs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    192: KernelConfigs(Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
    256: KernelConfigs(Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(16, 16, 8, 1)),
}
_HALF = {
    "sm_80": {
        64: KernelConfigs(Config(128, 64, 4, 3), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
        96: KernelConfigs(Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
        128: KernelConfigs(Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(128, 64, 8, 2)),
        192: KernelConfigs(Config(128, 32, 8, 2), Config(32, 32, 8, 2), Config(64, 16, 8, 2)),
        256: KernelConfigs(Config(64, 64, 8, 1), Config(64, 16, 8, 1), Config(64, 32, 8, 1)),
    },
    "sm_90": {
        64: KernelConfigs(
            Config(128, 128, 8, 2),
            Config(128, 32, 8, 3, tma=True, cut_resources=(8, 2)),
            Config(128, 128, 8, 2, tma=True),
        ),
        96: KernelConfigs(
            Config(128, 128, 8, 2),
            Config(128, 32, 8, 3, tma=True, cut_resources=(8, 2)),
            Config(128, 64, 8, 2, tma=True),
        ),
        128: KernelConfigs(
            Config(128, 64, 8, 2),
            Config(128, 32, 8, 3, tma=True, cut_resources=(8, 2)),
            Config(128, 64, 8, 2, tma=True),
        ),
        192: KernelConfigs(
            Config(128, 64, 8, 2),
            Config(32, 32, 8, 2, tma=True),
            Config(128, 32, 8, 2, tma=True),
        ),
        256: KernelConfigs(
            Config(64, 32, 8, 2, cut_resources=(8, 3)),
            Config(32, 32, 8, 2, tma=True),
            Config(64, 32, 8, 2, tma=True),
        ),
    },
    "gfx942": {
        64: KernelConfigs(Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(128, 64, 4, 1)),
        96: KernelConfigs(Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(128, 32, 4, 1)),
        128: KernelConfigs(Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(128, 32, 4, 1)),
        192: KernelConfigs(Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
        256: KernelConfigs(Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    },
}
# On Blackwell some configurations of sm_80 spilled registers: in loops, or elsewhere 200 bytes.
_HALF["sm_100"] = {
    64: _HALF["sm_80"][64]._replace(forward=Config(128, 64, 8, 3)),
    96: KernelConfigs(Config(128, 64, 8, 3), Config(128, 16, 8, 2), Config(128, 64, 8, 2)),
    128: _HALF["sm_80"][128]._replace(backward_kv=Config(64, 32, 8, 2)),
    192: KernelConfigs(Config(128, 64, 8, 2), Config(32, 32, 8, 2), Config(128, 32, 8, 2)),
    256: _HALF["sm_80"][256]._replace(backward_kv=Config(32, 32, 8, 1)),
}
_HALF["sm_120"] = {
    64: _HALF["sm_80"][64]._replace(forward=Config(128, 64, 8, 3)),
    96: KernelConfigs(Config(128, 32, 8, 2), Config(64, 16, 8, 2), Config(128, 32, 8, 2)),
    128: _HALF["sm_80"][128]._replace(
        forward=Config(128, 32, 8, 2), backward_q=Config(128, 32, 8, 2)
    ),
    192: KernelConfigs(Config(128, 16, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
    256: _HALF["sm_80"][256]._replace(backward_kv=Config(32, 32, 8, 1)),
}
# For operands without descriptors, whose rows are not a multiple of 16 bytes. Their addresses take
# registers: the configurations made for descriptors spilled up to 1,320 bytes.
_HALF["sm_90" + NO_DESCRIPTORS] = {
    64: KernelConfigs(Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
    96: KernelConfigs(Config(128, 32, 8, 2), Config(128, 16, 8, 2), Config(128, 32, 8, 2)),
    128: KernelConfigs(Config(128, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
    192: KernelConfigs(*[Config(32, 16, 8, 2)] * 3),
    256: KernelConfigs(Config(32, 32, 8, 2), Config(32, 16, 8, 2), Config(32, 32, 8, 1)),
}
WIDTHS = 64, 96, 128, 192, 256  # of tiles, in dims
# (architecture, "half" or "single" precision, width of tiles) -> configurations
TABLE: dict[tuple[str, str, int], KernelConfigs] = {}
for _name, _by_width in _HALF.items():
    TABLE |= {(_name, "half", width): configs for width, configs in _by_width.items()}
    TABLE |= {(_name, "single", width): configs for width, configs in _SINGLE.items()}
for _name in ("sm_80", "sm_120"):  # 99 KiB of shared memory must suffice
    TABLE[_name, "single", 256] = _SINGLE[256]._replace(backward_kv=Config(16, 16, 8, 1))
# On sm_120 the common configuration spilled in a loop.
TABLE["sm_120", "single", 128] = _SINGLE[128]._replace(backward_kv=Config(32, 16, 8, 1))
for _width in _SINGLE:
    for _precision in ("half", "single"):
        TABLE["interpreter", _precision, _width] = KernelConfigs(*[Config(32, 32, 4, 1)] * 3)


def architecture(device: torch.device) -> str:
    """Return the architecture whose configurations a device uses.

    NVIDIA GPUs of compute capability 11 use the configurations of sm_100. All other GPUs that are
    not in the table use the configurations of sm_80, which fit into the 99 KiB of shared memory of
    sm_86 and sm_89.
    """
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}.get(gpu_of(device).major, "sm_80")


def padded(dim: int) -> int:
    """Return the least power of two that is at least 16 and at least the head dim."""
    return max(16, triton.next_power_of_2(dim))


def pieces(dim: int) -> tuple[int, int]:
    """Return the dims of the two pieces of a tile, which are powers of two of at least 16.

    The padded dim is the head dim, rounded up to a power of two. If the padded dim is at least 64,
    and the head dim is at most 3/4 of the padded dim, there are two pieces: a half and a quarter of
    the padded dim. For example, 192 has pieces of 128 and 64. In all other cases, the second piece
    is 0.
    """
    whole = padded(dim)
    two = whole >= 64 and dim <= 3 * whole // 4
    return (whole // 2, whole // 4) if two else (whole, 0)


def width_of(*dims: int) -> int:
    """Return the least width in `TABLE` into which tiles of these head dims fit."""
    widest = max(sum(pieces(dim)) for dim in dims)
    return min(width for width in WIDTHS if width >= widest)


def choose(kind: str, q: Tensor, v: Tensor, device: torch.device | None = None) -> Config:
    """Return the configuration of the kernel `kind`, a field of `KernelConfigs`.

    A configuration that the tuner found takes precedence over the configuration in the table. The
    choice depends on the device, the dtype, and the head dims of queries (B, T, H, D) and values
    (B, Tk, Hkv, Dv). By default the device is that of the queries.
    """
    check_kind(kind, KernelConfigs._fields)
    check_operand("q", q)
    check_operand("v", v)
    return _chosen(kind, device or q.device, q.dtype, q.shape[-1], v.shape[-1], _variant)


@cache
def _chosen(
    kind: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    variant: str | None,
) -> Config:
    width = width_of(dim, value_dim)
    precision = "single" if dtype == torch.float32 else "half"
    name = architecture(device)
    if name == "sm_90" and any(x * dtype.itemsize % 16 for x in (dim, value_dim)):
        name += NO_DESCRIPTORS
    shipped: Config = getattr(TABLE[name, precision, width], kind)
    tuned_here = {} if name.endswith(NO_DESCRIPTORS) else tuned()
    config = tuned_here.get(tuning_key(kind, device, precision, width), shipped)
    return varied(config, variant) if variant is not None else config


_variant: str | None = None


@contextmanager
def variant(name: str | None) -> Iterator[None]:
    """Make `choose` return a variant of its configuration within the context, to measure it.

    None means no variant. The variant holds for all threads, since autograd has its own threads.
    """
    global _variant
    before, _variant = _variant, name
    try:
        yield
    finally:
        _variant = before


def varied(config: Config, name: str) -> Config:
    """Return a variant of a configuration, or the configuration itself if the variant does not
    apply."""
    return replace(config, **VARIANTS[name]) if config.tma else config


def tuning_key(kind: str, device: torch.device, precision: str, width: int) -> str:
    """Return the key of a tuned configuration: the setting for which it was tuned."""
    name = gpu_of(device).name if device.type == "cuda" else "interpreter"
    return f"{name}, triton {triton.__version__}, {precision}, {width}, {kind}"


def tuning_file() -> Path:
    """Return the file of tuned configurations, flash_attention.json.

    It is in $SEQPAR_CACHE or, without this variable, in ~/.cache/seqpar.
    """
    folder = Path(os.environ.get("SEQPAR_CACHE", "~/.cache/seqpar")).expanduser()
    return folder / "flash_attention.json"


def forget() -> None:
    """Read the tuning file again before the next choice of a configuration."""
    _chosen.cache_clear()
    tuned.cache_clear()


@cache
def tuned() -> dict[str, Config]:
    """Return the tuned configurations by key; the file is read once per process.

    Configurations of versions of the library whose fields differ are left out.
    """
    file = tuning_file()
    found = json.loads(file.read_text()) if file.is_file() else {}
    return {
        key: from_fields(fields)
        for key, fields in found.items()
        if fields.keys() == Config.__dataclass_fields__.keys()
    }


def from_fields(fields: dict[str, Any]) -> Config:
    """Make a configuration from fields that were read from JSON."""
    resources = fields["cut_resources"]
    return Config(**fields | {"cut_resources": resources and tuple(resources)})
