"""Preparing launches over tables of segments, as `flash_attention.launching` does over tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..flash_attention import configs as flash
from ..flash_attention.launching import Prepared, copied, ready, run, signature, strides
from .configs import Config

__all__ = ["Call", "addressable", "launches", "ready", "run", "signature", "strides"]


class Call(NamedTuple):
    """A call that lacks its tensors only; `copies` says which operands are copied first."""

    launches: list[Prepared]
    copies: tuple[bool, ...]


def addressable(*operands: Tensor) -> tuple[bool, ...]:
    """Return which operands (B, T, H, D) are copied: those whose chunks span 2**31 elements."""
    return copied(flash.Config(64, 0, 4, 1), operands)


def launches(
    kernel: Any,
    table: Tensor,
    programs: int,
    config: Config,
    arguments: tuple[Any, ...],
    flags: dict[str, Any],
) -> list[Prepared]:
    """Return the launch of so many programs for each entry of a table (n, ·), if it has any."""
    if not (grid := table.shape[0] * programs):
        return []
    flags = flags | {"num_warps": config.warps, "num_stages": config.stages}
    return [Prepared(kernel, (grid,), table.device, arguments, flags)]
