"""Attention over slices in plain PyTorch, for any float dtype.

Every other backend is tested against this one. Scores are (B, Hkv, G, n, m): batch, KV head, the G
query heads that share it, n query rows, m key rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.alibi import bias_of
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

forward_blocks = None  # `attend_blocks` calls `forward` for each block
MAX_SCORES = 2**24  # so many query rows are taken at a time that the scores stay below this


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    """Merge into `partial`, in its dtype, the attention of q (B, T, Hq, D) over k and v."""
    bias = bias_of(slices, options, k.shape[2], partial.out.dtype)
    for rows, keys, mask in _tiles(q, slices, options):
        scores = _scores(q[:, rows], k[:, keys], options, partial.out.dtype)
        scores = bias(scores, rows, keys).masked_fill(~mask, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        probability = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
        values = v[:, keys].to(scores.dtype)
        out = torch.einsum("bhgnm,bmhd->bnhgd", probability, values)
        if values.is_cpu and not math.isfinite(float(values.sum())):
            by_heads = values.permute(0, 2, 1, 3)[:, :, None]
            out = weighted_sum(probability, by_heads, mask).permute(0, 3, 1, 2, 4)
        partial.merge(rows, out.flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3))


def attention_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, n, Dv) and lse (B, Hq, n) in a dtype, of rows that may not be finite.

    q is (B, Hq, n, D), k (B, Hkv, m, D), v (B, Hkv, m, Dv), visible (n, m) or (1, m), and bias
    broadcasts to (B, Hq, n, m). A row depends only on the keys it attends to. It has out 0 and lse
    −inf if all of their scores are −inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bhnd,bhmd->bhnm", q.to(dtype), k) * scale
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    probability = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
    return weighted_sum(probability, v, visible), lse


def weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return weights (…, n, m) @ values (…, m, d), where only visible (n, m) values count.

    A visible value that is NaN makes the sum NaN, and so does an infinite one of weight 0.
    """
    total = weights @ values.masked_fill(~values.isfinite(), 0)
    seen = visible.expand_as(weights)
    count = lambda pairs, which: pairs.to(total.dtype) @ which.to(total.dtype) > 0  # noqa: E731
    upward = count(seen & (weights > 0), values.isposinf())
    downward = count(seen & (weights > 0), values.isneginf())
    undefined = count(seen, values.isnan()) | count(seen & (weights == 0), values.isinf())
    total = total.masked_fill(upward, torch.inf).masked_fill(downward, -torch.inf)
    return total.masked_fill(undefined | (upward & downward), torch.nan)


def backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    """Add to `gradients` what flows through the slices: dscore = p (dout·v − dout·out + dlse)."""
    dtype, kv_heads = gradients.dq.dtype, k.shape[2]
    bias = bias_of(slices, options, kv_heads, dtype)
    for rows, keys, mask in _tiles(q, slices, options):
        row_wise = (
            output.dout[:, rows].to(dtype),
            output.lse[:, rows],
            output.ensure_delta()[:, rows],
        )
        dout, lse, delta = (x.unflatten(2, (kv_heads, -1)) for x in row_wise)
        scores = _scores(q[:, rows], k[:, keys], options, dtype)
        biased = bias(scores, rows, keys)
        probability = torch.exp(biased - lse.permute(0, 2, 3, 1)[..., None]).masked_fill(~mask, 0)
        gradients.dv[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", probability, dout)
        dscore = torch.einsum("bnhgd,bmhd->bhgnm", dout, v[:, keys].to(dtype))
        dscore = probability * (dscore - delta.permute(0, 2, 3, 1)[..., None]) * options.scale
        if options.softcap:
            dscore = dscore * (1 - (scores / options.softcap) ** 2)
        gradients.dq[:, rows] += torch.einsum(
            "bhgnm,bmhd->bnhgd", dscore, k[:, keys].to(dtype)
        ).flatten(2, 3)
        q_grouped = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        gradients.dk[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", dscore, q_grouped)


def max_logits(q: Tensor, k: Tensor, slices: Slices, options: CallOptions) -> Tensor:
    """Return (Hq,): the largest scale · q·k of the slices' pairs, uncapped; −∞ of none."""
    dtype, uncapped = accumulator_dtype(q.dtype), replace(options, softcap=0.0)
    if options.anchored and k.shape[2] > 1:  # bits of a product may depend on how many heads it has
        by_kv_head = zip(q.tensor_split(k.shape[2], 2), k.split(1, 2), strict=True)
        parts = [max_logits(x.clone(), y.clone(), slices, options) for x, y in by_kv_head]
        return torch.cat(parts)
    found = q.new_full((q.shape[2],), -torch.inf, dtype=dtype)
    for rows, keys, mask in _tiles(q, slices, options):
        scores = _scores(q[:, rows], k[:, keys], uncapped, dtype).masked_fill_(~mask, -torch.inf)
        torch.maximum(found, scores.amax((0, 3, 4)).flatten(), out=found)
    return found


def _tiles(
    q: Tensor, slices: Slices, options: CallOptions
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the query rows, the key rows and the mask (n, m) of one tile after another."""
    rows_of_one = q.shape[0] * q.shape[2]
    tiles = slices.derived(("tiles", rows_of_one), lambda: list(_cut(slices, rows_of_one)))
    for rows, keys, band in tiles:
        yield rows, keys, slices.mask(rows, keys, band, q.device)


def _cut(slices: Slices, score_rows: int) -> Iterator[tuple[slice, slice, list[int]]]:
    """Yield the query rows, key rows and band of each tile; a query row has so many score rows."""
    columns = slices.q_rows.tolist(), slices.k_rows.tolist(), slices.bands.tolist()
    for (q_start, q_stop), (k_start, k_stop), band in zip(*columns, strict=True):
        step = max(1, MAX_SCORES // (score_rows * (k_stop - k_start)))
        for start in range(q_start, q_stop, step):
            yield slice(start, min(start + step, q_stop)), slice(k_start, k_stop), band


def _scores(q: Tensor, k: Tensor, options: CallOptions, dtype: torch.dtype) -> Tensor:
    """Return the scores (B, Hkv, G, n, m) of q (B, n, Hq, D) with k (B, m, Hkv, D)."""
    q_grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bnhgd,bmhd->bhgnm", q_grouped, k.to(dtype)) * options.scale
    return options.softcap * torch.tanh(scores / options.softcap) if options.softcap else scores
