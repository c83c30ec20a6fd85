"""Random operands, and attention in fp64 on these operands, for comparison with results.

If a batch has at most 2,048 tokens, all results are compared, and each rank compares some of the
heads. For a larger batch, only some rows of `out` are compared. In addition, all results of a batch
of the same kind with at most 2,048 tokens are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from seqpar.bench.workloads.sweep_batches import PackedBatch

# RMS error / RMS error of the one-device kernel (docs/internals/numerics.md).
MAX_ERROR_RATIO = 1.35
MAX_KERNEL_ERROR_RATIO = 2.0  # RMS error of the one-device kernel / of PyTorch in the same dtype
MIN_TOKENS_FOR_RATIOS = 1024  # with fewer tokens, the allowed error is the rounding of the dtype
MAX_ROUNDINGS = 16  # the same limit as in the tests of small shapes
NAMES = ("out", "dq", "dk", "dv")
Q, K, V, DOUT = range(4)
_TOKENS_PER_DRAW = 4096  # limits the memory of random numbers
Sums = dict[str, list[float]]  # tensor -> [sum of squared errors, sum of squared values, count]


class CheckSums(TypedDict):
    """The sums of squared errors on one rank: of the strategy or library that is checked, of plain
    PyTorch, and of some rows of a large batch.
    """

    errors: Sums
    eager: Sums
    spot: NotRequired[dict[str, Sums]]


def draw(which: int, indices: Tensor, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows of q, k, v or dout, (tokens, heads, dim). They are equal on all devices of one
    type.
    """
    device, blocks = indices.device, indices // _TOKENS_PER_DRAW
    tensor = torch.empty(len(indices), heads, dim, dtype=dtype, device=device)
    generator = torch.Generator(device)
    for block in blocks.unique().tolist():
        generator.manual_seed(4 * block + which)
        shape = _TOKENS_PER_DRAW, heads, dim
        drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
        rows = (blocks == block).nonzero().flatten()
        tensor[rows] = drawn[indices[rows] % _TOKENS_PER_DRAW]
    return tensor


def attention(
    batch: PackedBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    places: Tensor | None = None,
) -> list[Tensor]:
    """Compute `out` and, with `dout`, the gradients of q, k and v by the formulas of attention.

    Tensors are (T, H, D). k and v can have fewer heads than q and, without dout, a different dtype.
    Results have q's dtype. `places` are the indices of the queries in the batch, by default all
    indices. The scores of all queries and keys are in memory at the same time.
    """
    everything = torch.arange(len(k), device=k.device)
    seen = batch.visible(everything if places is None else places, everything)
    scale = q.shape[2] ** -0.5
    group = q.shape[1] // max(1, k.shape[1])
    results = [torch.zeros_like(x) for x in ((q,) if dout is None else (q, q, k, v))]
    for head in range(q.shape[1]):
        key, value = (x[:, head // group].to(q.dtype) for x in (k, v))
        scores = q[:, head] @ key.T * scale
        p = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        results[0][:, head] = p @ value
        if dout is None:
            continue
        gradient = dout[:, head]
        dp = gradient @ value.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        results[1][:, head] = ds @ key
        results[2][:, head // group] += ds.T @ q[:, head]
        results[3][:, head // group] += p.T @ gradient
    return results


def sums(results: Sequence[Tensor], expected: Sequence[Tensor]) -> Sums:
    """Return, for each tensor, the sums of squared errors and of squared values, and the count."""
    by_tensor = {}
    for name, x, y in zip(NAMES, results, expected, strict=False):
        error = (x.double() - y.double()).square().sum()
        by_tensor[name] = [float(error), float(y.double().square().sum()), float(y.numel())]
    return by_tensor


def add(parts: Sequence[Sums]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the RMS error and the RMS of each tensor, from the sums of all ranks."""
    errors, sizes = dict[str, float](), dict[str, float]()
    for name in parts[0]:
        error, square, count = map(sum, zip(*(x[name] for x in parts), strict=True))
        errors[name], sizes[name] = math.sqrt(error / count), math.sqrt(square / count)
    return errors, sizes


def wrong(errors: dict[str, float], allowed: dict[str, float], factor: float) -> str | None:
    """Describe the first RMS error that is larger than `factor` times the allowed error. Return
    None if there is no such error.
    """
    for name, error in errors.items():
        if not error <= factor * allowed[name]:
            times = error / allowed[name] if allowed[name] else math.inf
            return (
                f"wrong, so it was not timed: the RMS error of {name}, {error:.1e}, is "
                f"{times:.2f} times the reference's error, and may be {factor:g} times that"
            )
    return None
