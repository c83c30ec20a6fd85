"""How each kernel is launched: block sizes, warps and stages per (architecture, head dim, dtype), and the launch itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..flash_attention import configs as flash
from ..flash_attention.configs import architecture, padded

__all__ = ["KINDS", "SCAN", "SCAN_BLOCK", "STATE", "TABLE", "Config", "addressable", "choose", "constants", "launch", "padded"]

STATE = torch.float32
KINDS = ("recurrence", "states", "carry")


@dataclass(frozen=True)
class Config:
    """`rows` is the size of a chunk, `columns` that of tiles of the dims that are cut (powers of two, at least 16).

    `depth`: the recurrence contracts at most so many columns at once, and is launched again to add the others. For results
    in fp32 only, since each addition rounds.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 256

    def tile(self, dim: int) -> int:
        """The size of tiles along a dim that is cut."""
        return min(self.columns, padded(dim))


SCAN, SCAN_BLOCK = Config(0, 0, 4, 1), 1024  # elements of a state
Row = tuple[Config, Config, Config]
_SINGLE: dict[int, Row] = {  # IEEE fp32 products run on the ordinary units: small tiles, whose operands fit the registers
    64: (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: (Config(32, 32, 8, 1, depth=64), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    256: (Config(32, 32, 8, 1, depth=64), Config(32, 32, 8, 1), Config(16, 16, 8, 1)),
}
_HALF: dict[str, dict[int, Row]] = {
    "sm_80": {
        64: (Config(64, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        128: (Config(32, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        256: (Config(32, 32, 8, 2), Config(64, 64, 4, 3), Config(64, 64, 8, 2)),
    },
    "sm_90": {
        64: (Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        128: (Config(64, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
        256: (Config(32, 32, 8, 2), Config(64, 64, 4, 3), Config(64, 64, 8, 2)),
    },
    "gfx942": {
        64: (Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
        128: (Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
        256: (Config(32, 32, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    },
}
# (architecture, "half" or "single" precision, padded head dim) -> the configurations of KINDS
TABLE: dict[tuple[str, str, int], Row] = {
    **{(name, "half", width): row for name, rows in _HALF.items() for width, row in rows.items()},
    **{(name, "single", width): row for name in _HALF for width, row in _SINGLE.items()},
    **{("interpreter", p, width): (Config(32, 32, 4, 1),) * 3 for p in ("half", "single") for width in _SINGLE},
}


def choose(kind: str, x: Tensor, dim: int) -> Config:
    """The configuration of a kernel for operands (B, T, H, D) and others of head dim `dim`."""
    width = max(64, padded(x.shape[-1]), padded(dim))
    precision = "single" if x.dtype == torch.float32 else "half"
    return TABLE[architecture(x.device), precision, width][KINDS.index(kind)]


def constants(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels' compile-time arguments that follow from the configuration and the operands' dtype."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {"ROWS": config.rows, "PRECISION": "tf32" if dtype != torch.float32 or tf32 else "ieee"}


def addressable(*operands: Tensor) -> list[Tensor]:
    """Operands (B, T, H, D) that the kernels can address: copied are those whose chunks span 2**31 elements."""
    return flash.prepare(flash.Config(64, 0, 4, 1), *operands)[0]


def launch(kernel: Any, table: Tensor, programs: int, config: Config, arguments: list[Any], flags: dict[str, Any]) -> None:
    """Run so many programs for each row of a table, if there is any."""
    if grid := table.shape[0] * programs:
        flash.run(kernel, (grid,), table.device, arguments, flags, config.warps, config.stages)
