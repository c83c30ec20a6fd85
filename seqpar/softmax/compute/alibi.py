"""ALiBi: a bias of scores that is linear in the distance of query and key.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation" (2022), section 3. A head's bias is −slope · |i − j| for positions inside a document,
ends of documents aligned, whichever ranks hold the two tokens. It is computed from distances, which
are exact integers: the difference of two products of slope and position would lose their digits.

Legend: B batch, Hq query heads, Hkv KV heads, n query rows, m key rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.call_options import CallOptions

_DTYPES = torch.float32, torch.float64


def parse_slopes(slopes: Tensor | None) -> Tensor | None:
    """Return the slopes of a call; raise a ValueError if they require a gradient."""
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes must not require a gradient: they have none; use detach()")
    return slopes


def slopes_of(slopes: Tensor, shape: OperandShape) -> Tensor:
    """Return slopes as `CallOptions` has them; raise a ValueError if they are wrong."""
    heads, batch = shape.heads, shape.batch
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.dtype not in _DTYPES:
        expected = f"({heads},) or ({batch}, {heads}), one a query head, of fp32 or fp64"
        found = f"{tuple(slopes.shape)} of {slopes.dtype}"
        raise ValueError(f"alibi_slopes must be {expected}, got {found}")
    return slopes.to(accumulator_dtype(shape.dtype)).view(-1, heads)


def described_slopes(slopes: Tensor | None) -> dict[str, object]:
    """Return slopes by the name that users know, for the rank check."""
    return {"alibi_slopes": None if slopes is None or slopes.is_meta else slopes.tolist()}


def bias_of(
    slices: Slices, options: CallOptions, kv_heads: int, dtype: torch.dtype
) -> Callable[[Tensor, slice, slice], Tensor]:
    """Return what adds the bias to the scores (B, Hkv, G, n, m) of these query and key rows."""
    slopes = options.slopes
    if slopes is None:
        return lambda scores, rows, keys: scores
    by_groups = slopes.to(dtype).unflatten(1, (kv_heads, -1))[..., None, None]

    def biased(scores: Tensor, rows: slice, keys: slice) -> Tensor:
        return scores - by_groups * distances(slices, rows, keys, scores.device).to(dtype)

    return biased


def distances(slices: Slices, rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Return (n, m) int32: how far each of these query rows is from each of these key rows."""
    queries, positions = aligned_positions(slices, device)
    return (queries[rows, None] - positions[keys]).abs_()


def aligned_positions(slices: Slices, device: torch.device) -> list[Tensor]:
    """Return the positions of all query rows, ends aligned, and of all key rows, on a device."""
    host = slices.aligned, slices.k_positions
    build = lambda: [torch.from_numpy(positions).to(device) for positions in host]  # noqa: E731
    return slices.derived(("aligned positions", device), build)
