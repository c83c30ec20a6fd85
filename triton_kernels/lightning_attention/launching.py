"""Prepare launches over tables of segments, as `flash_attention.launching` does over tiles."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import Tensor

from ..flash_attention import configs as flash
from ..flash_attention.launching import Prepared, copied, ready, run, signature, strides
from .configs import Config

__all__ = ["Call", "launches", "must_copy", "ready", "run", "signature", "strides"]


class Call(NamedTuple):
    """A prepared call without its tensors. `copies` lists the operands that must be copied
    first."""

    launches: list[Prepared]
    copies: tuple[bool, ...]


def must_copy(*operands: Tensor, members: int = 1) -> tuple[bool, ...]:
    """Return, for each operand (B, T, H, D), whether it must be copied.

    It must be copied if a chunk, or the `members` heads that one program reads, spans 2**31
    elements.
    """
    far = copied(flash.Config(64, 0, 4, 1), operands)
    apart = ((members - 1) * x.stride(2) >= 2**31 for x in operands)
    return tuple(map(operator.or_, far, apart))


def launches(
    kernel: Any,
    table: Tensor,
    programs: int,
    config: Config,
    arguments: tuple[Any, ...],
    flags: dict[str, Any],
) -> list[Prepared]:
    """Return a launch of `programs` programs per entry of a table (n, ·), or no launch if n = 0."""
    if not (grid := table.shape[0] * programs):
        return []
    flags = flags | {"num_warps": config.warps, "num_stages": config.stages}
    return [Prepared(kernel, (grid,), table.device, arguments, flags)]
