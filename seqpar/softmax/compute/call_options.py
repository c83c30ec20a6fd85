"""`CallOptions`: the options that determine the scores, and ALiBi's bias.

ALiBi subtracts slope · |i − j| from the score of the query at position i and the key at position j
(Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation", 2022, section 3). Each head has its own slope. Positions are counted within a
document, and the last query and the last key of a document have the same position.

Letters of shapes: B is the batch, Hq the number of query heads, Hkv the number of KV heads, G the
number of query heads per KV head, n the number of query rows, and m the number of key rows.
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

# A softcap c lowers a score s by about s³/3c². With a cap of 1e30 or more, this is less than the
# rounding error of the score, for all scores below 1e21 in fp64 and 1e26 in fp32. Dividing a score
# by such a cap would only lose digits to underflow. Such caps are therefore ignored.
_MIN_INEFFECTIVE_SOFTCAP = 1e30
_MIN_SOFTCAP = 1e-30


def parse_softcap(name: str, softcap: object) -> float:
    """Return the softcap as a number, where 0 means no softcap.

    A softcap of None returns 0. A softcap that is too large to change any score also returns 0.
    """
    if isinstance(softcap, Tensor):
        refuse_tangents(**{name: softcap})
        if softcap.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient: it has none")
    number = 0.0 if softcap is None else as_float(name, softcap)
    return 0.0 if _MIN_INEFFECTIVE_SOFTCAP <= number < math.inf else number


class CallOptions(NamedTuple):
    """The options with which ranks and attention servers compute the scores of a call."""

    # The score of a pair is scale · q·k.
    scale: Annotated[float, Option(as_float, 1.0, "softmax_scale")]
    # A softcap c > 0 turns a score s into c · tanh(s / c). 0 means no softcap.
    softcap: Annotated[float, Option(parse_softcap, 0.0)]
    backend: str  # the name of a backend, or DEFAULT
    deterministic: bool  # whether the backend's backward must have the same bits in each run
    # ALiBi's slopes, (1 or B, Hq), in the accumulator's dtype; None without ALiBi.
    slopes: Tensor | None = None
    # Whether queries are computed in tiles that begin at fixed positions of a document, so that
    # results have the same bits on any number of ranks.
    rank_invariant: Annotated[bool, NOT_CARRIED] = False

    def with_slopes(self, slopes: Tensor | None) -> CallOptions:
        return self if slopes is self.slopes else self._replace(slopes=slopes)

    def of_heads(self, heads: slice) -> CallOptions:
        return self.with_slopes(None if self.slopes is None else self.slopes[:, heads])

    def check(self, dtype: torch.dtype) -> None:
        """Raise a ValueError if the scale or the softcap is out of range.

        The limits depend on the accumulator's dtype for operands of the dtype `dtype`.
        """
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
    heads, batch = shape.heads, shape.batch
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.dtype not in _SLOPE_DTYPES:
        expected = f"({heads},) or ({batch}, {heads}), one per query head, of fp32 or fp64"
        actual = f"{tuple(slopes.shape)} of {slopes.dtype}"
        raise ValueError(f"alibi_slopes must be {expected}, got {actual}")
    return slopes.to(accumulator_dtype(shape.dtype)).view(-1, heads)


def make_add_bias(
    slices: Slices, options: CallOptions, kv_heads: int, dtype: torch.dtype
) -> Callable[[Tensor, slice, slice], Tensor]:
    """Return a function that adds ALiBi's bias to scores (B, Hkv, G, n, m).

    There are G query heads per KV head, n query rows and m key rows. The arguments of the returned
    function are the scores, the range of the query rows, and the range of the key rows.
    """
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
    """Return the distance in tokens between each query in `rows` and each key in `keys`, (n, m)
    int32.
    """
    queries, positions = aligned_positions(slices, device)
    return (queries[rows, None] - positions[keys]).abs_()


def aligned_positions(slices: Slices, device: torch.device) -> list[Tensor]:
    """Return two tensors: the positions of all query rows, and the positions of all key rows.

    The last query and the last key of a document have the same position.
    """
    on_host = slices.aligned, slices.k_positions
    tables = slices.derived("aligned positions", lambda: [torch.from_numpy(x) for x in on_host])
    return [on_device(x, device) for x in tables]
