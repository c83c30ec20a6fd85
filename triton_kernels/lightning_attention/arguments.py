"""Check what the kernels' functions are given, before anything is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..checks import Shapes, check_number, check_type
from ..flash_attention.launching import precision, signature
from .configs import Config
from .tables import SegmentTables


def call_key(tables: Any, config: Any, scale: Any, reverse: bool, *tensors: Any) -> Hashable:
    """Return what a call is known by among those prepared of its tables.

    Raise a ValueError that names an argument which has not the right type.
    """
    check_type("tables", tables, SegmentTables)
    check_type("config", config, Config)
    check_number("scale", scale)
    switch = precision(getattr(tensors[0], "dtype", None))
    return config, scale, bool(reverse), switch, signature(*tensors)


def check_decay(log_decay: Tensor) -> Shapes:
    """Check what all kernels are given, and return the sizes: log_decay is (G,).

    Raise a ValueError that names a wrong argument.
    """
    shapes = Shapes()
    shapes.check("log_decay", log_decay, "G", [torch.float64])
    return shapes
