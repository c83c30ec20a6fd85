"""Decoding: go on with one or a few tokens of each document, with the states of those before."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.operands import check_dtypes
from seqpar.attention.operators import without_autocast
from seqpar.core.arguments import as_float, check_tensor
from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Inputs, check_gates, check_heads, expand
from seqpar.linear.kinds import advance
from seqpar.linear.kinds import kind as kind_of


def decode_step(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Go on with t tokens of each of N documents: return out and the next state.

    It is plain PyTorch, which autograd differentiates, and nothing is sent. Autocast does not
    change it.

    Args:
        kind: the kind of recurrence, by its name.
        q: (N, Hq, K), one token each, or (N, t, Hq, K); fp64, fp32, bf16 or fp16.
        k: (N, Hk, K) or (N, t, Hk, K).
        v: (N, Hv, V) or (N, t, Hv, V). Heads are shared as in a call, H = max(Hk, Hv).
        state: (N, H, K, V), fp32 (fp64 for fp64): what a call or a step before returned.
        log_decay: as the kind has it: None, (H,), (N, H) or (N, H, K), with t after N where q has
            it. Its values are not checked, which would cost a synchronisation on a GPU.
        beta: (N, H) or (N, t, H) for the delta rule, otherwise None.
        scale: what q·k is multiplied by.

    Returns:
        out (N, max(Hq, H), V) or (N, t, max(Hq, H), V) in q's dtype, and the next state, like
        `state`.

    Raises:
        ValueError: if the shape, dtype or device of an argument is wrong; it names the argument.
    """
    this = kind_of(kind)
    gates = {"log_decay": log_decay, "beta": beta}
    check_tensor("q", q)
    for name, x in {"k": k, "v": v, "state": state, **gates}.items():
        if x is not None or name not in gates:
            check_tensor(name, x, q.device)
    if not isinstance(scale, Tensor) or scale.dim():
        scale = as_float("scale", scale)
    single = q.dim() == 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != q.dim() or x.dim() not in (3, 4) or 0 in x.shape[-2:]:
            raise ValueError(f"{name} must be (N, H, D) or (N, t, H, D), got {tuple(x.shape)}")
    if single:
        q, k, v = (x[:, None] for x in (q, k, v))
        beta = None if beta is None else beta.unsqueeze(min(1, beta.dim()))  # checked below
        if log_decay is not None and this.decay != "constant":
            log_decay = log_decay.unsqueeze(min(1, log_decay.dim()))
    inputs = Inputs(q, k, v, log_decay, beta)
    _check(inputs, state)
    check_gates(this, inputs, "N" if single else "N, t")
    with without_autocast(q):
        outs, state = _steps(expand(inputs), state, scale)
    out = torch.stack(outs, 1) if outs else q.new_zeros(inputs.out_shape)
    out = out.to(inputs.q.dtype)
    return (out[:, 0] if single else out), state


def _steps(inputs: Inputs, state: Tensor, scale: float | Tensor) -> tuple[list[Tensor], Tensor]:
    """Return out of each token in turn, (N, max(Hq, H), V), and the last state."""
    q, k, v, log_decay, beta = inputs
    outs = []
    for t in range(q.shape[1]):
        decay = torch.ones_like(k[:, t, :, :1]) if log_decay is None else log_decay[:, t].exp()
        state = advance(state, k[:, t], v[:, t], decay, None if beta is None else beta[:, t])
        grouped = q[:, t].unflatten(1, (state.shape[1], -1)) * scale
        outs.append((grouped @ state).flatten(1, 2))
    return outs, state


def _check(inputs: Inputs, state: Tensor) -> None:
    q, k, v = inputs[:3]
    check_dtypes(q, k, v)
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != q.shape[:2]:
            expected = f"q's {q.shape[0]} documents and {q.shape[1]} tokens"
            raise ValueError(f"{name} must have {expected}, got {tuple(x.shape[:2])}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim, {q.shape[3]}, got {k.shape[3]}")
    check_heads(inputs)
    dtype = accumulator_dtype(q.dtype)
    if tuple(state.shape) != inputs.state_shape or state.dtype != dtype:
        expected = f"{inputs.state_shape} (N, H, K, V) of {dtype}"
        raise ValueError(f"state must be {expected}, got {tuple(state.shape)} of {state.dtype}")
