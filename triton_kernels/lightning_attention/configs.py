"""Configurations of the kernels: sizes of chunks, warps and stages.

The configuration of a kernel depends on the architecture, the precision and the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_dim, check_kind, check_operand
from ..flash_attention.configs import architecture, padded
from ..flash_attention.launching import precision

__all__ = [
    "SCAN",
    "SCAN_BLOCK",
    "STATE",
    "TABLE",
    "Config",
    "KernelConfigs",
    "choose",
    "constants",
    "padded",
]

STATE = torch.float32  # the dtype of states


@dataclass(frozen=True)
class Config:
    """The sizes of a kernel's chunks and blocks, and its numbers of warps and stages.

    A chunk has `chunk_rows` rows. If a head dim is cut, it is cut into blocks of `block_dims` dims.
    Both numbers are powers of two, and at least 16. One launch of the recurrence sums over at most
    `depth` dims, and further launches add the remaining dims. With several launches, results must
    be fp32, because each addition rounds.
    """

    chunk_rows: int
    block_dims: int
    warps: int
    stages: int
    depth: int = 256

    def block(self, dim: int) -> int:
        """Return the size of blocks along a cut head dim."""
        return min(self.block_dims, padded(dim))


class KernelConfigs(NamedTuple):
    """The configurations of the kernels for one architecture, precision and head dim."""

    recurrence: Config
    states: Config
    carry: Config


SCAN, SCAN_BLOCK = Config(0, 0, 4, 1), 1024  # elements of a state in a program
# IEEE fp32 products run on the ordinary units: small chunks, whose operands fit the registers.
_SINGLE = {
    64: KernelConfigs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: KernelConfigs(Config(32, 32, 8, 1, depth=64), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    256: KernelConfigs(Config(32, 32, 8, 1, depth=64), Config(32, 32, 8, 1), Config(16, 16, 8, 1)),
}
_HALF = {
    "sm_80": {
        64: KernelConfigs(Config(64, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        128: KernelConfigs(Config(32, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        256: KernelConfigs(Config(32, 32, 8, 2), Config(64, 64, 4, 3), Config(64, 64, 8, 2)),
    },
    "sm_90": {
        64: KernelConfigs(Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        128: KernelConfigs(Config(64, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        256: KernelConfigs(Config(32, 32, 8, 2), Config(64, 64, 4, 3), Config(64, 64, 8, 2)),
    },
    "gfx942": {
        64: KernelConfigs(Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
        128: KernelConfigs(Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
        256: KernelConfigs(Config(32, 32, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    },
}
_HALF["sm_100"] = _HALF["sm_80"]
_HALF["sm_120"] = _HALF["sm_80"] | {  # the recurrence of sm_80 spilled in loops
    256: _HALF["sm_80"][256]._replace(recurrence=Config(32, 16, 8, 2))
}
# (architecture, "half" or "single" precision, padded head dim of at least 64) -> configurations
TABLE: dict[tuple[str, str, int], KernelConfigs] = {}
for _name, _by_width in _HALF.items():
    TABLE |= {(_name, "half", width): configs for width, configs in _by_width.items()}
    TABLE |= {(_name, "single", width): configs for width, configs in _SINGLE.items()}
for _width in _SINGLE:
    for _precision in ("half", "single"):
        TABLE["interpreter", _precision, _width] = KernelConfigs(*[Config(32, 32, 4, 1)] * 3)


def choose(kind: str, x: Tensor, dim: int, device: torch.device | None = None) -> Config:
    """Return the configuration of the kernel `kind`, a field of `KernelConfigs`.

    The choice depends on the device, the dtype and the head dim of an operand `x` (B, T, H, D), and
    on `dim`, the head dim of the remaining operands. By default the device is that of `x`.
    """
    check_kind(kind, KernelConfigs._fields)
    check_operand("x", x)
    check_dim("dim", dim)
    return _chosen(kind, device or x.device, x.dtype, max(x.shape[-1], dim))


@cache
def _chosen(kind: str, device: torch.device, dtype: torch.dtype, dim: int) -> Config:
    width, of_products = max(64, padded(dim)), "single" if dtype == torch.float32 else "half"
    config: Config = getattr(TABLE[architecture(device), of_products, width], kind)
    return config


def constants(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernels' compile-time arguments, which follow from configuration and dtype."""
    return {"CHUNK_ROWS": config.chunk_rows, "PRECISION": precision(dtype)}
