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
    check_launches(launches, config)
    return config, score_key(scale, softcap, tensors[0]), signature(*tensors)


def check_launches(launches: Any, config: Any) -> None:
    """Check the types of launches and of their configuration."""
    check_type("launches", launches, Launches)
    check_type("config", config, Config)


def score_key(scale: Any, softcap: Any, q: Any) -> Hashable:
    """Return what a call's scores are known by, likewise."""
    check_number("scale", scale)
    check_number("softcap", softcap)
    return scale, softcap, precision(getattr(q, "dtype", None))


def check_call(q: Tensor, k: Tensor, v: Tensor, shapes: Shapes | None = None) -> Shapes:
    """Check what all kernels are given: q (B, T, H, D), k (B, K, G, D) and v (B, K, G, V).

    Return the sizes, with those of `shapes`. Raise a ValueError that names a wrong argument.
    """
    shapes = Shapes() if shapes is None else shapes
    for name, x, dims in (("q", q, "B T H D"), ("k", k, "B K G D"), ("v", v, "B K G V")):
        shapes.check(name, x, dims, DTYPES)
    shapes.check_shared("q", "H", "G")
    return shapes


def check_backward(operands: Sequence[Tensor], lse: Tensor, delta: Tensor) -> Shapes:
    """Check what both kernels of backward are given, likewise."""
    q, k, v, dout = operands
    shapes = Shapes()
    shapes.check("dout", dout, "B T H V", DTYPES)  # first, so that a wrong v is what errors name
    check_call(q, k, v, shapes)
    shapes.check("lse", lse, "B T H", ACCUMULATORS)
    shapes.check("delta", delta, "B T H", ACCUMULATORS)
    return shapes
