"""The options with which scores are computed, checks of their values, and ALiBi's bias.

ALiBi is a bias that is linear in the distance between query and key: Press et al., "Train Short,
Test Long: Attention with Linear Biases Enables Input Length Extrapolation" (2022), section 3. A
head's bias is −slope · |i − j|, where i and j are positions in a document whose queries and keys
are aligned at their ends. Which ranks hold the tokens does not matter. The bias is computed from
distances, which are exact integers: slope · i − slope · j would lose digits where positions are
large.

Legend: B batch, Hq query heads, Hkv KV heads, n query rows, m key rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.call_arguments import NOT_CARRIED, Option
from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import refuse_tangents
from seqpar.core.arguments import as_float
from seqpar.core.device_tables import on_device, rehearsing
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Slices

# A softcap c lowers a score s by s³/3c². With a cap of 1e30 or more, this is less than the rounding
# error of any score under 1e21 in fp64 and 1e26 in fp32. Dividing a score by such a cap would only
# lose its digits to underflow, so such caps are ignored.
_MIN_INEFFECTIVE_SOFTCAP = 1e30
_MIN_SOFTCAP = 1e-30


def parse_softcap(name: str, softcap: object) -> float:
    """Return the softcap; 0 if it is None or too large to have an effect."""
    if isinstance(softcap, Tensor):
        refuse_tangents(**{name: softcap})
        if softcap.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient: it has none")
    number = 0.0 if softcap is None else as_float(name, softcap)
    return 0.0 if _MIN_INEFFECTIVE_SOFTCAP <= number < math.inf else number


class CallOptions(NamedTuple):
    """How ranks and servers compute a call's scores: their formula, and the backend."""

    # a score is scale · q·k
    scale: Annotated[float, Option(as_float, 1.0, "softmax_scale")]
    # caps a score to softcap · tanh(scale · q·k / softcap), or 0 for no cap
    softcap: Annotated[float, Option(parse_softcap, 0.0)]
    backend: str  # the name of a backend, or DEFAULT
    deterministic: bool  # whether the backend's backward must give the same bits each time
    # (1 or B, Hq), in the accumulator's dtype: a head's slope times the distance between the two
    # positions is subtracted from a score
    slopes: Tensor | None = None
    # Whether bits must be the same on any number of ranks. Tiles then begin at fixed positions of a
    # document.
    rank_invariant: Annotated[bool, NOT_CARRIED] = False

    def with_slopes(self, slopes: Tensor | None) -> CallOptions:
        return self if slopes is self.slopes else self._replace(slopes=slopes)

    def of_heads(self, heads: slice) -> CallOptions:
        return self.with_slopes(None if self.slopes is None else self.slopes[:, heads])

    def check(self, dtype: torch.dtype) -> None:
        """Raise a ValueError if a number is outside the range of the accumulator of a dtype."""
        scale, softcap = self.scale, self.softcap
        accumulator = torch.finfo(accumulator_dtype(dtype))
        smallest, largest = accumulator.smallest_normal, accumulator.max
        if scale and not smallest <= abs(scale) <= largest:
            limits = f"0 or of {smallest:.3g} to {largest:.3g}, either sign"
            raise ValueError(f"softmax_scale must be finite, {limits}, got {scale}")
        if not 0 <= softcap < math.inf:
            raise ValueError(f"softcap must be finite and not negative (0 is none), got {softcap}")
        least = max(_MIN_SOFTCAP, abs(scale) / largest)
        if 0 < softcap < least:
            raise ValueError(f"softcap must be 0 (none) or at least {least:.3g}, got {softcap}")


_SLOPE_DTYPES = torch.float32, torch.float64


def parse_slopes(slopes: Tensor | None) -> Tensor | None:
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes must not require a gradient: they have none; use detach()")
    return slopes


def check_slopes(slopes: Tensor, shape: OperandShape) -> Tensor:
    """Return slopes as `CallOptions` holds them: (1 or B, Hq), in the accumulator's dtype."""
    heads, batch = shape.heads, shape.batch
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.dtype not in _SLOPE_DTYPES:
        expected = f"({heads},) or ({batch}, {heads}), one per query head, of fp32 or fp64"
        actual = f"{tuple(slopes.shape)} of {slopes.dtype}"
        raise ValueError(f"alibi_slopes must be {expected}, got {actual}")
    return slopes.to(accumulator_dtype(shape.dtype)).view(-1, heads)


def make_add_bias(
    slices: Slices, options: CallOptions, kv_heads: int, dtype: torch.dtype
) -> Callable[[Tensor, slice, slice], Tensor]:
    """Return a function that adds the bias to scores (B, Hkv, G, n, m) of query and key rows."""
    slopes = options.slopes
    if slopes is None:
        return lambda scores, rows, keys: scores
    if rehearsing():
        aligned_positions(slices, slopes.device)
    by_groups = slopes.to(dtype).unflatten(1, (kv_heads, -1))[..., None, None]

    def add_bias(scores: Tensor, rows: slice, keys: slice) -> Tensor:
        return scores - by_groups * distances(slices, rows, keys, scores.device).to(dtype)

    return add_bias


def distances(slices: Slices, rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Return (n, m) int32: the distance in tokens between each query row and each key row."""
    queries, positions = aligned_positions(slices, device)
    return (queries[rows, None] - positions[keys]).abs_()


def aligned_positions(slices: Slices, device: torch.device) -> list[Tensor]:
    """Return positions on a device: of all query rows, aligned at the end, and of all key rows."""
    on_host = slices.aligned, slices.k_positions
    tables = slices.derived("aligned positions", lambda: [torch.from_numpy(x) for x in on_host])
    return [on_device(x, device) for x in tables]
