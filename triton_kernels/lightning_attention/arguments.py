"""Check what the kernels' functions are given, before anything is read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Shapes, check_number, check_type
from .configs import Config
from .tables import SegmentTables


def check_call(tables: SegmentTables, config: Config, log_decay: Tensor, scale: float) -> Shapes:
    """Check what all kernels are given, and return the sizes: log_decay is (G,).

    Raise a ValueError that names a wrong argument.
    """
    check_type("tables", tables, SegmentTables)
    check_type("config", config, Config)
    check_number("scale", scale)
    shapes = Shapes()
    shapes.check("log_decay", log_decay, "G", [torch.float64])
    return shapes
