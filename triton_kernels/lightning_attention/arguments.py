"""Check the arguments of the kernels' functions before any tensor is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Shapes, check_number, check_rows, check_type
from ..flash_attention import launching as flash
from .configs import Config
from .tables import SegmentTables


class Walk(NamedTuple):
    """The arguments of a call that say how it walks its segments (`tables.py` defines a walk)."""

    tables: SegmentTables
    config: Config
    reverse: bool  # whether each span is walked from its end


def call_key(known_by: Hashable, walk: Walk, scale: float, *tensors: Any) -> Hashable:
    """Return the key of a call among the prepared calls of its tables.

    If `known_by` is given, it represents everything except the alignments of the tensors. Calls
    that differ only in their scale have the same key.

    Raises a ValueError that names an argument of a wrong type.
    """
    if known_by is not None:
        return known_by, flash.alignments(*tensors)
    check_type("tables", walk.tables, SegmentTables)
    check_type("config", walk.config, Config)
    check_number("scale", scale)
    return walk.config, bool(walk.reverse), signature(*tensors)


def signature(*tensors: Any) -> Hashable:
    """Return everything in the tensors on which a call depends, except their values."""
    return flash.precision(getattr(tensors[0], "dtype", None)), flash.signature(*tensors)


def check_decay(log_decay: Tensor) -> Shapes:
    """Check log_decay (G,) and the other arguments of all kernels, and return the sizes.

    Raises a ValueError that names a wrong argument.
    """
    shapes = Shapes()
    shapes.check("log_decay", log_decay, "G", [torch.float64])
    check_rows("log_decay", log_decay)
    return shapes
