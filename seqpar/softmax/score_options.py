"""What scores are made with: the scale of a call, and its softcap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import refuse_tangents
from seqpar.core.arguments import as_float
from seqpar.core.dtypes import accumulator_dtype
from seqpar.softmax.compute.partial import SoftmaxOptions

# A softcap c takes s³/3c² from a score s. If c is so large, that is below the rounding of any score
# under 1e21 in fp64 and 1e26 in fp32; a score divided by it would lose its digits to underflow.
_NO_CAP, _LEAST_CAP = 1e30, 1e-30


def parse_softcap(softcap: float | None) -> float:
    """Return the softcap, with 0 for None and for one so large that it caps nothing."""
    if isinstance(softcap, Tensor):
        refuse_tangents(softcap=softcap)
        if softcap.requires_grad and torch.is_grad_enabled():
            raise ValueError("softcap must not require a gradient: it has none")
    number = 0.0 if softcap is None else as_float("softcap", softcap)
    return 0.0 if _NO_CAP <= number < math.inf else number


def check_numbers(options: SoftmaxOptions, shape: OperandShape) -> None:
    """Raise a ValueError that names a number with which scores cannot be computed."""
    scale, softcap = options.scale, options.softcap
    accumulator = torch.finfo(accumulator_dtype(shape.dtype))
    smallest, largest = accumulator.smallest_normal, accumulator.max
    if scale and not smallest <= abs(scale) <= largest:
        limits = f"0 or of {smallest:.3g} to {largest:.3g}, either sign"
        raise ValueError(f"softmax_scale must be finite, {limits}, got {scale}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and not negative (0 is none), got {softcap}")
    least = max(_LEAST_CAP, abs(scale) / largest)
    if 0 < softcap < least:
        raise ValueError(f"softcap must be 0 (none) or at least {least:.3g}, got {softcap}")
