"""Check what the kernels' functions are given, before anything is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..checks import Shapes, check_number, check_type
from ..flash_attention import launching as flash
from .configs import Config
from .tables import SegmentTables


def call_key(
    known_by: Hashable, tables: Any, config: Any, scale: Any, reverse: bool, *tensors: Any
) -> Hashable:
    """Return what a call is known by among those prepared of its tables: `known_by`, if not None.

    Raise a ValueError that names an argument which has not the right type.
    """
    if known_by is not None:
        return known_by
    check_type("tables", tables, SegmentTables)
    check_type("config", config, Config)
    check_number("scale", scale)
    return config, scale, bool(reverse), signature(*tensors)


def signature(*tensors: Any) -> Hashable:
    """Return all that a call depends on of its tensors but values, the first for its precision."""
    return flash.precision(getattr(tensors[0], "dtype", None)), flash.signature(*tensors)


def check_decay(log_decay: Tensor) -> Shapes:
    """Check what all kernels are given, and return the sizes: log_decay is (G,).

    Raise a ValueError that names a wrong argument.
    """
    shapes = Shapes()
    shapes.check("log_decay", log_decay, "G", [torch.float64])
    return shapes
