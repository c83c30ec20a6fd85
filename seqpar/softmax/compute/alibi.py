"""ALiBi: a bias of scores that is linear in the distance between query and key.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation" (2022), section 3. A head's bias is −slope · |i − j|, where i and j are positions in
a document whose queries and keys are aligned at their ends. Which ranks hold the tokens does not
matter. The bias is computed from distances, which are exact integers: slope · i − slope · j would
lose digits where positions are large.

Legend: B batch, Hq query heads, Hkv KV heads, n query rows, m key rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.device_tables import on_device, rehearsing
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.call_options import CallOptions

_DTYPES = torch.float32, torch.float64


def parse_slopes(slopes: Tensor | None) -> Tensor | None:
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes must not require a gradient: they have none; use detach()")
    return slopes


def check_slopes(slopes: Tensor, shape: OperandShape) -> Tensor:
    """Return slopes as `CallOptions` holds them: (1 or B, Hq), in the accumulator's dtype."""
    heads, batch = shape.heads, shape.batch
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.dtype not in _DTYPES:
        expected = f"({heads},) or ({batch}, {heads}), one per query head, of fp32 or fp64"
        actual = f"{tuple(slopes.shape)} of {slopes.dtype}"
        raise ValueError(f"alibi_slopes must be {expected}, got {actual}")
    return slopes.to(accumulator_dtype(shape.dtype)).view(-1, heads)


def described_slopes(slopes: Tensor | None) -> dict[str, object]:
    return {"alibi_slopes": None if slopes is None or slopes.is_meta else slopes.tolist()}


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
