"""Check the arguments of the kernels' functions before any tensor is read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import DTYPES, Shapes, check_number, check_type
from .configs import Config
from .launching import precision
from .tables import Launches

ACCUMULATORS = torch.float32, torch.float64


def check_launches(
    launches: Any, config: Any, name: str = "launches", config_name: str = "config"
) -> None:
    """Check the types of launches and of their configuration; errors use the given names."""
    check_type(name, launches, Launches)
    check_type(config_name, config, Config)


def score_key(scale: Any, softcap: Any, q: Any) -> Hashable:
    """Check the options of scores, and return their part of the key of a call."""
    check_number("scale", scale)
    check_number("softcap", softcap)
    return scale, softcap, precision(getattr(q, "dtype", None))


def check_slopes(shapes: Shapes, slopes: Tensor | None) -> int:
    """Check ALiBi's slopes, (H,) or (B, H) fp32, and return their stride along the batch."""
    if slopes is None:
        return 0
    shared = isinstance(slopes, Tensor) and slopes.dim() == 1
    shapes.check("slopes", slopes, "H" if shared else "B H", [torch.float32])
    return 0 if shared else slopes.shape[1]


def check_call(q: Tensor, k: Tensor, v: Tensor, shapes: Shapes | None = None) -> Shapes:
    """Check the operands of all kernels: q (B, T, H, D), k (B, K, G, D) and v (B, K, G, V).

    Returns the sizes by letter, such as B and T. The sizes are added to `shapes`. Raises a
    ValueError that names a wrong argument.
    """
    shapes = Shapes() if shapes is None else shapes
    for name, x, dims in (("q", q, "B T H D"), ("k", k, "B K G D"), ("v", v, "B K G V")):
        shapes.check(name, x, dims, DTYPES)
    shapes.check_shared("q", "H", "G")
    return shapes


def check_backward(operands: Sequence[Tensor], lse: Tensor, delta: Tensor) -> Shapes:
    """Check the operands of both backward kernels; see `check_call`."""
    q, k, v, dout = operands
    shapes = Shapes()
    shapes.check("dout", dout, "B T H V", DTYPES)  # first, so that errors name a wrong v
    check_call(q, k, v, shapes)
    shapes.check("lse", lse, "B T H", ACCUMULATORS)
    shapes.check("delta", delta, "B T H", ACCUMULATORS)
    return shapes
