"""Decoding: continue each document by one or a few tokens, from the state of the earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.operands import check_dtypes
from seqpar.attention.operators import without_autocast
from seqpar.core.arguments import as_float, check_tensor
from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.inputs import Inputs, check_constant_decay, check_gates, check_heads, expand
from seqpar.linear.kinds import advance
from seqpar.linear.kinds import kind as kind_of


def decode_step(
    kind: str, inputs: Inputs, state: Tensor, scale: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Continue each of N documents by one token or by t tokens. Return out and the next state.

    The function is plain PyTorch and sends nothing. It supports autograd. Autocast has no effect on
    the function.

    Args:
        kind: the name of the kind of recurrence.
        inputs: the tensors of the new tokens. q is (N, Hq, K), or (N, t, Hq, K) for t tokens, in
            fp64, fp32, bf16 or fp16. k (…, Hk, K) and v (…, Hv, V) have the same number of
            dimensions and the same dtype as q. Heads are shared as in a call, with H = max(Hk, Hv).
            `log_decay` is None, (H,), (…, H) or (…, H, K), as the kind requires. Its values are not
            checked, because this would synchronise a GPU with the host. For the delta rule, `beta`
            is (…, H). For all other kinds, `beta` is None.
        state: (N, H, K, V), in fp32 (fp64 for fp64). The state from a call or an earlier step.
        scale: the factor of q·k.

    Returns:
        out (…, max(Hq, H), V) in q's dtype, and the next state, like `state`.

    Raises:
        ValueError: if the shape, dtype or device of an argument is wrong; the message names it.
    """
    this, (q, k, v, log_decay, beta) = kind_of(kind), inputs
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
        # The shape of beta is checked below.
        beta = None if beta is None else beta.unsqueeze(min(1, beta.dim()))
        if log_decay is not None and this.decay != "constant":
            log_decay = log_decay.unsqueeze(min(1, log_decay.dim()))
    inputs = Inputs(q, k, v, log_decay, beta)
    _check(inputs, state)
    check_gates(this, inputs, "N" if single else "N, t")
    with without_autocast(q):
        expanded = expand(inputs)
        decay = None if expanded.log_decay is None else expanded.log_decay.exp()
        out, state = _steps(expanded, decay, state, scale)
    out = out.to(q.dtype)
    return (out[:, 0] if single else out), state


def decode_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Continue each of N documents by one token. Return out and the next state.

    The function is plain PyTorch and sends nothing. Autocast has no effect on the function.

    Args:
        q: (N, Hq, D), fp64, fp32, bf16 or fp16.
        k: (N, Hkv, D). Hq must be a multiple of Hkv.
        v: (N, Hkv, Dv).
        state: (N, Hkv, D, Dv), in fp32 (fp64 for fp64). The state from a call or an earlier step.
        log_decay: (Hkv,) in fp32 or fp64, on q's device or the CPU. Its values are not checked,
            because this would synchronise a GPU with the host.
        scale: the factor of q·k.

    Returns:
        out (N, Hq, Dv) in q's dtype, and the next state, like `state`.

    Raises:
        ValueError: if the shape, dtype or device of an argument is wrong; the message names it.
    """
    _check_linear(q, k, v, state, log_decay)
    if not isinstance(scale, Tensor) or scale.dim():
        scale = as_float("scale", scale)
    inputs = Inputs(q[:, None], k[:, None], v[:, None])
    with without_autocast(q):
        decay = None
        if log_decay is not None:
            decay = torch.exp(log_decay.double()).to(state)[None, None, :, None]
        out, state = _steps(expand(inputs), decay, state, scale)
    return out[:, 0].to(q.dtype), state


def _steps(
    inputs: Inputs, decay: Tensor | None, state: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return out (N, t, max(Hq, H), V) in the accumulator's dtype, and the state after the last
    token.
    """
    q, k, v, _, beta = inputs
    outs = []
    for t in range(q.shape[1]):
        decay_now = torch.ones_like(k[:, t, :, :1]) if decay is None else decay[:, t]
        state = advance(state, k[:, t], v[:, t], decay_now, None if beta is None else beta[:, t])
        grouped = q[:, t].unflatten(1, (state.shape[1], -1)) * scale
        outs.append((grouped @ state).flatten(1, 2))
    return (torch.stack(outs, 1) if outs else q.new_zeros(inputs.out_shape)), state


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
    _check_state(state, inputs.state_shape, "H, K, V", q.dtype)


def _check_state(
    state: Tensor, shape: tuple[int, ...], dims: str, dtype_of_call: torch.dtype
) -> None:
    dtype = accumulator_dtype(dtype_of_call)
    if tuple(state.shape) != shape or state.dtype != dtype:
        found = f"{tuple(state.shape)} of {state.dtype}"
        raise ValueError(f"state must be {shape} (N, {dims}) of {dtype}, got {found}")


def _check_linear(q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None) -> None:
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
    _check_state(state, (tokens, kv_heads, dim, v.shape[2]), "Hkv, D, Dv", q.dtype)
    check_constant_decay(log_decay, kv_heads, q.device)
