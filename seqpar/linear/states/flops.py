"""Count the FLOPs of the operators of linear attention, for torch's FlopCounterMode.

They are those of its recurrent form, in which a token costs as much wherever it is: forward adds an
outer product k·vᵀ (D × Dv) to the state, and multiplies the state by q; backward does the first
again, and has two products for each of the gradients of q, and of k and v. A multiplication and an
addition are 2 FLOPs. Chunks, with which kernels compute, take more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqpar.linear.states.operator  # noqa: F401  defines the operators that are counted
from seqpar.attention.operators import FLOP_FORMULAS


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, out_val: Any = None) -> int:
    heads, kv_heads, per_head = _sizes(q, k, v)
    return per_head * (heads + kv_heads)


def _backward(
    dout: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
    out_val: Any = None,
) -> int:
    heads, kv_heads, per_head = _sizes(q, k, v)
    return per_head * (2 * heads + 3 * kv_heads)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the numbers of heads, and the FLOPs of one product of all tokens in one head."""
    batch, tokens, heads, dim = q.shape
    return heads, k.shape[2], 2 * batch * tokens * dim * v.shape[3]


FLOP_FORMULAS[torch.ops.seqpar.linear_attention] = _forward
FLOP_FORMULAS[torch.ops.seqpar.linear_attention_backward] = _backward
