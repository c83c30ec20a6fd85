"""Give each state its queries, keys and values, where heads share them, and sum gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.recurrent.inputs import Gradients, Inputs


def expand(inputs: Inputs) -> Inputs:
    """Return the inputs in their accumulator, with as many heads as each state needs.

    q becomes (B, T, max(Hq, H), K), k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H, 1 or K) and
    beta (B, T, H, 1). Without decay log_decay is None.
    """
    dtype, heads = accumulator_dtype(inputs.q.dtype), inputs.heads
    q, k, v, log_decay, beta = inputs
    if log_decay is not None:
        if log_decay.dim() == 1:
            log_decay = log_decay.expand(*q.shape[:2], heads)
        log_decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(dtype)
    beta = None if beta is None else beta[..., None].to(dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q = repeated(q, max(heads, q.shape[2]))
    return Inputs(q, repeated(k, heads), repeated(v, heads), log_decay, beta)


def expanded_gradients(inputs: Inputs) -> Gradients:
    """Return memory for gradients that `fold` takes: those of q, k and v as they are in `inputs`.

    Those of log_decay and beta are in the accumulator, like `expand`'s.
    """
    dtype, rows = accumulator_dtype(inputs.q.dtype), inputs.q.shape[:2]

    def empty(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.new_empty((*rows, inputs.heads, x.shape[3] if x.dim() == 4 else 1), dtype=dtype)

    q, k, v, log_decay, beta = inputs
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return Gradients(dq, dk, dv, empty(log_decay), empty(beta))


def fold(inputs: Inputs, gradients: Gradients) -> Gradients:
    """Return the gradients of `inputs`, given those of what `expand` made of them."""
    remaining = iter(x for x in gradients if x is not None)

    def folded(x: Tensor) -> Tensor:
        gradient = next(remaining)
        if x.dim() == 1:
            gradient = gradient.sum((0, 1, 3), dtype=torch.float64)
        elif x.dim() == 3:
            gradient = gradient[..., 0]
        elif x.shape[2] != gradient.shape[2]:
            gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3)
        return gradient.to(x.dtype)

    return Gradients.of(inputs, folded)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return x (B, T, h, …) with so many heads, a multiple of h."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
