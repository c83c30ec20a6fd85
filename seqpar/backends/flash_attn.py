"""Attention over slices with the package flash-attn (Dao's FlashAttention-2), where it is installed.

It computes full and causal pieces, in bf16 and fp16 on CUDA; what it cannot (bands cut by a window, a softcap) is computed in
plain PyTorch, exactly. Users who trust its kernels more than ours ask for it with `seqpar.use_backend("flash_attn")`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seqpar.backends import aten
from seqpar.mask import Slices

if TYPE_CHECKING:
    from seqpar.attend import Gradients, Partial, Scoring, Upstream

MAX_HEAD_DIM = 256


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these operands cannot be computed, naming the argument, or None."""
    if importlib.util.find_spec("flash_attn") is None:
        return 'the backend "flash_attn" needs the package flash-attn, which is not installed: pip install flash-attn'
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        return f'q must be bf16 or fp16 on a CUDA device for the backend "flash_attn", got {q.dtype} on {q.device}'
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM - 8:  # the gradient of lse takes a column beside v
        return f'q and v must have head dims of at most {MAX_HEAD_DIM - 8} for the backend "flash_attn", got {q.shape[-1]}'
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring) -> None:
    """Merge into `partial` the attention of q (B, T, H, D) over k and v."""
    aten.forward_by(_forward, _share(slices, scoring), q, k, v, slices, partial, scoring)


def backward(up: Upstream, q: Tensor, k: Tensor, v: Tensor, slices: Slices, gradients: Gradients, scoring: Scoring) -> None:
    """Add to `gradients` what flows through the slices."""
    aten.backward_by(_backward, _share(slices, scoring), up, q, k, v, slices, gradients, scoring)


def _share(slices: Slices, scoring: Scoring) -> aten.Share:
    return ([], slices) if scoring.softcap else aten.share_unmasked(slices)


def _forward(q: Tensor, k: Tensor, v: Tensor, piece: aten.Piece, slices: Slices, scoring: Scoring) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_interface

    out, lse, *_ = flash_attn_interface._flash_attn_forward(
        q, k, v, 0.0, scoring.scale, causal=piece.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out, lse.transpose(1, 2)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    piece: aten.Piece,
    slices: Slices,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn import flash_attn_interface

    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    flash_attn_interface._flash_attn_backward(
        dout.contiguous(), q, k, v, out, lse.transpose(1, 2).contiguous(), dq, dk, dv, 0.0, scoring.scale,
        causal=piece.causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        deterministic=scoring.deterministic,
    )  # fmt: skip
    return dq, dk, dv
