"""Check what the kernels' functions are given, before anything is read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import DTYPES, Shapes, check_number, check_type
from .configs import Config
from .launching import precision, signature
from .tables import Launches

ACCUMULATORS = torch.float32, torch.float64


def call_key(launches: Any, config: Any, scale: Any, softcap: Any, *tensors: Any) -> Hashable:
    """Return what a call is known by among those prepared of its launches.

    Raise a ValueError that names an argument which has not the right type.
    """
    check_type("launches", launches, Launches)
    check_type("config", config, Config)
    check_number("scale", scale)
    check_number("softcap", softcap)
    switch = precision(getattr(tensors[0], "dtype", None))
    return config, scale, softcap, switch, signature(*tensors)


def check_call(q: Tensor, k: Tensor, v: Tensor) -> Shapes:
    """Check what all kernels are given: q (B, T, H, D), k (B, K, G, D) and v (B, K, G, V).

    Return the sizes. Raise a ValueError that names a wrong argument.
    """
    shapes = Shapes()
    for name, x, dims in (("q", q, "B T H D"), ("k", k, "B K G D"), ("v", v, "B K G V")):
        shapes.check(name, x, dims, DTYPES)
    shapes.check_shared("q", "H", "G")
    return shapes


def check_backward(operands: Sequence[Tensor], lse: Tensor, delta: Tensor) -> Shapes:
    """Check what both kernels of backward are given, likewise."""
    q, k, v, dout = operands
    shapes = check_call(q, k, v)
    shapes.check("dout", dout, "B T H V", DTYPES)
    shapes.check("lse", lse, "B T H", ACCUMULATORS)
    shapes.check("delta", delta, "B T H", ACCUMULATORS)
    return shapes
