"""The backend "reference": attention in plain PyTorch.

This backend computes all float dtypes and options. All other backends are tested against it, and
some backends call it for masks that they cannot compute.

Letters of shapes: B is the batch, Hkv the number of KV heads, G the number of query heads per KV
head, n the number of query rows, and m the number of key rows. Scores are (B, Hkv, G, n, m).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor

from seqpar.core.device_tables import rehearsing
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.call_options import CallOptions, make_add_bias
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

forward_blocks = None  # `attend_blocks` calls `forward` for each block
MAX_SCORES = 2**24  # the number of scores that are computed at a time, which limits memory


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    """Merge the attention of q (B, T, Hq, D) over k and v into `partial`, in the dtype of
    `partial`.
    """
    add_bias = make_add_bias(slices, options, k.shape[2], partial.dtype)
    for rows, keys, mask in _tiles(q, slices):
        scores = _scores(q[:, rows], k[:, keys], options, partial.dtype)
        scores = add_bias(scores, rows, keys).masked_fill(~mask, -torch.inf)
        # The largest score of a row is subtracted, because the sum of exponentials of large scores
        # would lose digits of lse. Partial results are weighted by lse.
        largest = scores.amax(-1, keepdim=True).nan_to_num(torch.nan, 0, 0)
        scores -= largest
        rest = torch.logsumexp(scores, -1)
        probability = torch.exp(scores - rest.masked_fill(rest.isneginf(), 0)[..., None])
        lse = rest.double() + largest[..., 0]
        values = v[:, keys].to(scores.dtype)
        out = torch.einsum("bhgnm,bmhd->bnhgd", probability, values)
        if values.is_cpu and not math.isfinite(float(values.sum())):
            by_heads = rearrange(values, "b m h d -> b h 1 m d")
            out = rearrange(weighted_sum(probability, by_heads, mask), "b h g n d -> b n h g d")
        out = rearrange(out, "b n h g d -> b n (h g) d")
        partial.merge(rows, out, rearrange(lse, "b h g n -> b n (h g)"), is_owned=True)


def attention_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, n, Dv) and lse (B, Hq, n) of rows that may contain NaNs or infinities.

    A NaN or an infinity in a key affects only the rows that attend to the key. If all scores of a
    row are −inf, its out is 0 and its lse is −inf.

    Args:
        q: (B, Hq, n, D).
        k, v: (B, Hkv, m, D) and (B, Hkv, m, Dv).
        visible: (n, m) or (1, m). Whether each row attends to each key.
        bias: a tensor that is broadcast to scores (B, Hq, n, m) and added to them, or None.
        scale: the factor of q·k.
        dtype: the dtype of the computation and of the results.
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
    """Return weights (…, n, m) @ values (…, m, d), where each row sums only its visible values.

    `visible` says which values each row sums. A sum is NaN in two cases: if a visible value is NaN,
    or if a visible value is infinite and has weight 0.
    """
    total = weights @ values.masked_fill(~values.isfinite(), 0)
    attended = visible.expand_as(weights)
    any_of = lambda pairs, flags: pairs.to(total.dtype) @ flags.to(total.dtype) > 0  # noqa: E731
    upward = any_of(attended & (weights > 0), values.isposinf())
    downward = any_of(attended & (weights > 0), values.isneginf())
    undefined = any_of(attended, values.isnan())
    undefined |= any_of(attended & (weights == 0), values.isinf())
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
    """Add the gradients of the slices to `gradients`.

    A score with probability p has the gradient p (dout·v − dout·out + dlse).
    """
    dtype, kv_heads = gradients.dq.dtype, k.shape[2]
    add_bias = make_add_bias(slices, options, kv_heads, dtype)
    for rows, keys, mask in _tiles(q, slices):
        dout = rearrange(output.dout[:, rows].to(dtype), "b n (h g) d -> b n h g d", h=kv_heads)
        of_rows = output.lse[:, rows], output.ensure_delta()[:, rows]
        lse, delta = (rearrange(x, "b n (h g) -> b h g n 1", h=kv_heads) for x in of_rows)
        scores = _scores(q[:, rows], k[:, keys], options, dtype)
        biased = add_bias(scores, rows, keys)
        probability = torch.exp(biased - lse).masked_fill(~mask, 0)
        gradients.dv[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", probability, dout)
        dscore = torch.einsum("bnhgd,bmhd->bhgnm", dout, v[:, keys].to(dtype))
        dscore = probability * (dscore - delta) * options.scale
        if options.softcap:
            dscore = dscore * (1 - (scores / options.softcap) ** 2)
        dq = torch.einsum("bhgnm,bmhd->bnhgd", dscore, k[:, keys].to(dtype))
        gradients.dq[:, rows] += rearrange(dq, "b n h g d -> b n (h g) d")
        q_grouped = rearrange(q[:, rows].to(dtype), "b n (h g) d -> b n h g d", h=kv_heads)
        gradients.dk[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", dscore, q_grouped)


def max_logits(q: Tensor, k: Tensor, slices: Slices, options: CallOptions) -> Tensor:
    """Return the largest scale · q·k of each head over the slices, without softcap, (Hq,).

    A head without (query, key) pairs gets −∞.
    """
    dtype, uncapped = accumulator_dtype(q.dtype), options._replace(softcap=0.0)
    # One KV head at a time, because bits may depend on the number of heads.
    if options.rank_invariant and k.shape[2] > 1:
        by_kv_head = zip(q.tensor_split(k.shape[2], 2), k.split(1, 2), strict=True)
        parts = [max_logits(x.clone(), y.clone(), slices, options) for x, y in by_kv_head]
        return torch.cat(parts)
    largest = q.new_full((q.shape[2],), -torch.inf, dtype=dtype)
    for rows, keys, mask in _tiles(q, slices):
        scores = _scores(q[:, rows], k[:, keys], uncapped, dtype).masked_fill_(~mask, -torch.inf)
        torch.maximum(largest, scores.amax((0, 3, 4)).flatten(), out=largest)
    return largest


def _tiles(q: Tensor, slices: Slices) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the query rows, the key rows and the mask (n, m) of each tile of the slices.

    In a rehearsal, which runs a call on meta tensors, nothing is yielded.
    """
    if rehearsing():
        slices.positions_on(q.device)
        return
    score_rows = q.shape[0] * q.shape[2]  # rows of scores per query row
    tiles = slices.derived(("tiles", score_rows), lambda: list(_cut(slices, score_rows)))
    for rows, keys, band in tiles:
        yield rows, keys, slices.mask(rows, keys, band, q.device)


def _cut(slices: Slices, score_rows: int) -> Iterator[tuple[slice, slice, list[int]]]:
    columns = slices.q_rows.tolist(), slices.k_rows.tolist(), slices.bands.tolist()
    for (q_start, q_stop), (k_start, k_stop), band in zip(*columns, strict=True):
        step = max(1, MAX_SCORES // (score_rows * (k_stop - k_start)))
        for start in range(q_start, q_stop, step):
            yield slice(start, min(start + step, q_stop)), slice(k_start, k_stop), band


def _scores(q: Tensor, k: Tensor, options: CallOptions, dtype: torch.dtype) -> Tensor:
    q_grouped = rearrange(q.to(dtype), "b n (h g) d -> b n h g d", h=k.shape[2])
    scores = torch.einsum("bnhgd,bmhd->bhgnm", q_grouped, k.to(dtype)) * options.scale
    return options.softcap * torch.tanh(scores / options.softcap) if options.softcap else scores
