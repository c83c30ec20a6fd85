"""Attention over slices in plain PyTorch, for any float dtype: what every other backend is tested against.

Scores are (B, Hkv, G, n, m): batch, KV head, the G query heads that share it, n query rows, m key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seqpar.mask import Slices

if TYPE_CHECKING:
    from seqpar.attend import Gradients, Partial, Scoring, Upstream

_MAX_SCORES = 2**24  # the query rows of a slice are taken so many at a time that the scores stay below this


def forward(q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring) -> None:
    """Merge into `partial` the attention of q (B, T, Hq, D) over k and v, in its accumulator's dtype."""
    for rows, keys, seen in _tiles(q, slices):
        scores = _scores(q[:, rows], k[:, keys], scoring, partial.out.dtype).masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        probability = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
        out = torch.einsum("bhgnm,bmhd->bnhgd", probability, v[:, keys].to(scores.dtype))
        partial.merge(rows, out.flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3))


def backward(up: Upstream, q: Tensor, k: Tensor, v: Tensor, slices: Slices, gradients: Gradients, scoring: Scoring) -> None:
    """Add to `gradients` what flows through the slices: dscore = p (dout·v − dout·out + dlse)."""
    dtype, kv_heads = gradients.dq.dtype, k.shape[2]
    for rows, keys, seen in _tiles(q, slices):
        row_wise = up.dout[:, rows].to(dtype), up.lse[:, rows], up.with_delta()[:, rows]
        dout, lse, delta = (x.unflatten(2, (kv_heads, -1)) for x in row_wise)
        scores = _scores(q[:, rows], k[:, keys], scoring, dtype)
        probability = torch.exp(scores - lse.permute(0, 2, 3, 1)[..., None]).masked_fill(~seen, 0)
        gradients.dv[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", probability, dout)
        dscore = torch.einsum("bnhgd,bmhd->bhgnm", dout, v[:, keys].to(dtype))
        dscore = probability * (dscore - delta.permute(0, 2, 3, 1)[..., None]) * scoring.scale
        if scoring.softcap:
            dscore = dscore * (1 - (scores / scoring.softcap) ** 2)
        gradients.dq[:, rows] += torch.einsum("bhgnm,bmhd->bnhgd", dscore, k[:, keys].to(dtype)).flatten(2, 3)
        q_grouped = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        gradients.dk[:, keys] += torch.einsum("bhgnm,bnhgd->bmhd", dscore, q_grouped)


def _tiles(q: Tensor, slices: Slices) -> Iterator[tuple[slice, slice, Tensor]]:
    """The query rows, the key rows and who sees whom (n, m), of one tile after another."""
    columns = slices.q_rows.tolist(), slices.k_rows.tolist(), slices.bands.tolist()
    for (q_start, q_stop), (k_start, k_stop), band in zip(*columns, strict=True):
        step = max(1, _MAX_SCORES // (q.shape[0] * q.shape[2] * (k_stop - k_start)))
        for start in range(q_start, q_stop, step):
            rows, keys = slice(start, min(start + step, q_stop)), slice(k_start, k_stop)
            yield rows, keys, slices.seen(rows, keys, band).to(q.device)


def _scores(q: Tensor, k: Tensor, scoring: Scoring, dtype: torch.dtype) -> Tensor:
    q_grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bnhgd,bmhd->bhgnm", q_grouped, k.to(dtype)) * scoring.scale
    return scoring.softcap * torch.tanh(scores / scoring.softcap) if scoring.softcap else scores
