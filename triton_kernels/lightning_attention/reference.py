"""The recurrence token by token in plain PyTorch, to test the kernels.

Autograd can differentiate the recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Sequence[int],
    initial: Sequence[Tensor | None],
    log_decay: Tensor | None,
    scale: float,
) -> tuple[Tensor, list[Tensor]]:
    """Return out (B, T, H, Dv), and each span's state (B, Hkv, D, Dv) after its last row.

    q is (B, T, H, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv). Span i has rows edges[i] … edges[i + 1],
    and the spans cover all rows. Span i begins with the state initial[i], or zero. log_decay is
    (Hkv,).
    """
    group = q.shape[2] // k.shape[2]
    if log_decay is None:
        log_decay = torch.zeros(k.shape[2])
    decay = log_decay.to(q).exp()[:, None, None]
    rows, states = [q.new_empty(q.shape[0], 0, q.shape[2], v.shape[3])], []
    for start, stop, entering in zip(edges[:-1], edges[1:], initial, strict=True):
        state = q.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]) if entering is None else entering
        for t in range(start, stop):
            state = decay * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            row = torch.einsum("bhd,bhde->bhe", q[:, t], state.repeat_interleave(group, 1))
            rows.append(scale * row[:, None])
        states.append(state)
    return torch.cat(rows, 1), states
