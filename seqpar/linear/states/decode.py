"""Decoding: attend to one token of each document, with the states of those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.operands import check_dtypes
from seqpar.attention.operators import without_autocast
from seqpar.core.arguments import as_float, check_tensor
from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.states.decay import check_decay


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attend to one token of each of N documents: return out and the next state.

    It is plain PyTorch, and nothing is sent. Autocast does not change it.

    Args:
        q: (N, Hq, D), fp64, fp32, bf16 or fp16.
        k: (N, Hkv, D); Hq must be a multiple of Hkv.
        v: (N, Hkv, Dv).
        state: (N, Hkv, D, Dv), fp32 (fp64 for fp64): what a call or a step before returned.
        log_decay: (Hkv,) fp32 or fp64, on q's device or the CPU. Its values are not checked, which
            would cost a synchronisation on a GPU.
        scale: what q·k is multiplied by.

    Returns:
        out (N, Hq, Dv) in q's dtype, and the next state, like `state`.

    Raises:
        ValueError: if the shape, dtype or device of an argument is wrong; it names the argument.
    """
    _check(q, k, v, state, log_decay)
    if not isinstance(scale, Tensor) or scale.dim():
        scale = as_float("scale", scale)
    decay: float | Tensor = 1.0
    if log_decay is not None:
        decay = torch.exp(log_decay.double()).to(state)[:, None, None]
    added = k[..., :, None].to(state.dtype) * v[..., None, :].to(state.dtype)
    state = state * decay + added
    grouped = q.to(state.dtype).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])) * scale
    with without_autocast(q):
        out = grouped @ state
    return out.flatten(1, 2).to(q.dtype), state


def _check(q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None) -> None:
    check_tensor("q", q)
    for name, x in (("k", k), ("v", v), ("state", state)):
        check_tensor(name, x, q.device)
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q must be (N, Hq, D), got {tuple(q.shape)}")
    tokens, heads, dim = q.shape
    if k.dim() != 3 or k.shape[::2] != (tokens, dim) or not k.shape[1] or heads % k.shape[1]:
        expected = f"({tokens}, Hkv, {dim}), with a number of heads that divides q's {heads}"
        raise ValueError(f"k must be {expected}, got {tuple(k.shape)}")
    kv_heads = k.shape[1]
    if v.dim() != 3 or v.shape[:2] != (tokens, kv_heads) or not v.shape[2]:
        raise ValueError(f"v must be ({tokens}, {kv_heads}, Dv), got {tuple(v.shape)}")
    check_dtypes(q, k, v)
    expected_state, dtype = (tokens, kv_heads, dim, v.shape[2]), accumulator_dtype(q.dtype)
    if tuple(state.shape) != expected_state or state.dtype != dtype:
        expected = f"{expected_state} (N, Hkv, D, Dv) of {dtype}"
        raise ValueError(f"state must be {expected}, got {tuple(state.shape)} of {state.dtype}")
    check_decay(log_decay, kv_heads, q.device)
