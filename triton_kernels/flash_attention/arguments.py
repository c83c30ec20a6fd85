"""Check what the kernels' functions are given, before anything is read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import DTYPES, Shapes, check_list, check_number, check_type
from .configs import Config
from .tables import Launch

ACCUMULATORS = torch.float32, torch.float64


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    launches: list[Launch],
    config: Config,
    scale: float,
    softcap: float,
) -> Shapes:
    """Check what all kernels are given: q (B, T, H, D), k (B, K, G, D) and v (B, K, G, V).

    Return the sizes. Raise a ValueError that names a wrong argument.
    """
    shapes = Shapes()
    for name, x, dims in (("q", q, "B T H D"), ("k", k, "B K G D"), ("v", v, "B K G V")):
        shapes.check(name, x, dims, DTYPES)
    shapes.check_shared("q", "H", "G")
    check_list("launches", launches, Launch)
    check_type("config", config, Config)
    check_number("scale", scale)
    check_number("softcap", softcap)
    return shapes


def check_backward(
    operands: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    launches: list[Launch],
    config: Config,
    scale: float,
    softcap: float,
) -> Shapes:
    """Check what both kernels of backward are given, likewise."""
    q, k, v, dout = operands
    shapes = check_call(q, k, v, launches, config, scale, softcap)
    shapes.check("dout", dout, "B T H V", DTYPES)
    shapes.check("lse", lse, "B T H", ACCUMULATORS)
    shapes.check("delta", delta, "B T H", ACCUMULATORS)
    return shapes
