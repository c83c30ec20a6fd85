"""The options that change a call's scores, and checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import refuse_tangents
from seqpar.core.arguments import as_float
from seqpar.core.dtypes import accumulator_dtype

# A softcap c lowers a score s by s³/3c². With a cap of 1e30 or more, this is less than the rounding
# error of any score under 1e21 in fp64 and 1e26 in fp32. Dividing a score by such a cap would only
# lose its digits to underflow, so such caps are ignored.
_MIN_INEFFECTIVE_SOFTCAP = 1e30
_MIN_SOFTCAP = 1e-30


@dataclass(frozen=True)
class CallOptions:
    """Options of a call that change its scores, and the backend that computes them."""

    scale: float  # a score is scale · q·k
    softcap: float  # caps a score to softcap · tanh(scale · q·k / softcap), or 0 for no cap
    backend: str  # the name of a backend, or DEFAULT
    deterministic: bool  # whether the backend's backward must give the same bits each time
    # (1 or B, Hq), in the accumulator's dtype: a head's slope times the distance between the two
    # positions is subtracted from a score. Equality ignores the slopes.
    slopes: Tensor | None = field(default=None, compare=False, repr=False)
    # Whether tiles begin at fixed positions of a document, wherever its tokens are
    anchored: bool = False

    def with_slopes(self, slopes: Tensor | None) -> CallOptions:
        return self if slopes is self.slopes else replace(self, slopes=slopes)

    def of_heads(self, heads: slice) -> CallOptions:
        return self.with_slopes(None if self.slopes is None else self.slopes[:, heads])


def parse_softcap(softcap: float | None) -> float:
    """Return the softcap; 0 if it is None or too large to have an effect."""
    if isinstance(softcap, Tensor):
        refuse_tangents(softcap=softcap)
        if softcap.requires_grad and torch.is_grad_enabled():
            raise ValueError("softcap must not require a gradient: it has none")
    number = 0.0 if softcap is None else as_float("softcap", softcap)
    return 0.0 if _MIN_INEFFECTIVE_SOFTCAP <= number < math.inf else number


def check_numbers(options: CallOptions, shape: OperandShape) -> None:
    """Raise a ValueError if the scale or the softcap is outside the accumulator's range."""
    scale, softcap = options.scale, options.softcap
    accumulator = torch.finfo(accumulator_dtype(shape.dtype))
    smallest, largest = accumulator.smallest_normal, accumulator.max
    if scale and not smallest <= abs(scale) <= largest:
        limits = f"0 or of {smallest:.3g} to {largest:.3g}, either sign"
        raise ValueError(f"softmax_scale must be finite, {limits}, got {scale}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and not negative (0 is none), got {softcap}")
    least = max(_MIN_SOFTCAP, abs(scale) / largest)
    if 0 < softcap < least:
        raise ValueError(f"softcap must be 0 (none) or at least {least:.3g}, got {softcap}")
