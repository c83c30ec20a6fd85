"""Attention over slices in plain PyTorch, differentiable by autograd, to test the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .tables import SliceTable


def visible_mask(slices: SliceTable) -> Tensor:
    """Return (T, Tk) bool: whether each query attends to each key."""
    mask = torch.zeros(slices.q_positions.size, slices.k_positions.size, dtype=torch.bool)
    for (q_start, q_stop), (k_start, k_stop), (low, high) in zip(
        slices.q_rows, slices.k_rows, slices.bands, strict=True
    ):
        q_positions = torch.from_numpy(slices.q_positions[q_start:q_stop]).long()
        k_positions = torch.from_numpy(slices.k_positions[k_start:k_stop]).long()
        distance = k_positions - q_positions[:, None]
        mask[q_start:q_stop, k_start:k_stop] |= (distance >= low) & (distance <= high)
    return mask


def distances(slices: SliceTable) -> Tensor:
    """Return (T, Tk): the distance of each query from each key, with aligned document ends."""
    aligned = getattr(slices, "q_aligned", None)
    queries = slices.q_positions if aligned is None else aligned
    q_positions, k_positions = (torch.from_numpy(x).long() for x in (queries, slices.k_positions))
    return (k_positions - q_positions[:, None]).abs()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: SliceTable,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, T, H, Dv) and the natural lse (B, T, H).

    q is (B, T, H, D), k (B, Tk, Hkv, D) and v (B, Tk, Hkv, Dv); slopes are (H,) or (B, H).
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distances(slices).to(q.device)
    scores = scores.masked_fill(~visible_mask(slices).to(q.device), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    return torch.einsum("bhnm,bmhd->bnhd", p, v), lse.transpose(1, 2)
