"""Attention over slices with the package flash-attn (Dao's FlashAttention-2), if it is installed.

It computes full and causal pieces, in bf16 and fp16 on CUDA. Plain PyTorch computes the rest:
pieces under a mask, such as a window's, a softcap, and ALiBi's slopes, as the package's own count
distances by rows. Users who trust its kernels more than ours ask for it with
`seqpar.use_backend("flash_attn")`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten, pieces
from seqpar.softmax.backends.pieces import Piece, WorkSplit
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

forward_blocks = None  # `attend_blocks` calls `forward` for each block
MAX_HEAD_DIM = 256 - 8  # the gradient of lse takes a column beside v


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why these operands cannot be computed, naming the argument, or None."""
    backend = 'the backend "flash_attn"'
    if importlib.util.find_spec("flash_attn") is None:
        package = "the package flash-attn, which is not installed"
        return f"{backend} needs {package}: pip install flash-attn"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        found = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {found}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        limit = f"head dims of at most {MAX_HEAD_DIM}"
        return f"q and v must have {limit} for {backend}, got {q.shape[-1]}"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    """Merge into `partial` the attention of q (B, T, Hq, D) over k and v; see `attend`."""
    split = _split_work(slices, options)
    aten.forward_by(_forward, split, q, k, v, slices, partial, options)


def backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    """Add to `gradients` what flows through the slices; see `attend_backward`."""
    split = _split_work(slices, options)
    aten.backward_by(_backward, split, output, q, k, v, slices, gradients, options)


def _split_work(slices: Slices, options: CallOptions) -> WorkSplit:
    changes_scores = options.softcap or options.slopes is not None
    return pieces.all_plain(slices) if changes_scores else pieces.unmasked_fused(slices)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, slices: Slices, options: CallOptions
) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_interface

    out, lse, *_ = flash_attn_interface._flash_attn_forward(
        q, k, v, 0.0, options.scale, causal=piece.causal, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out, lse.transpose(1, 2)


def _backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    slices: Slices,
    options: CallOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn import flash_attn_interface

    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lse = lse.transpose(1, 2).contiguous()
    flash_attn_interface._flash_attn_backward(
        dout.contiguous(), q, k, v, out, lse, dq, dk, dv, 0.0, options.scale,
        causal=piece.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, deterministic=options.deterministic,
    )  # fmt: skip
    return dq, dk, dv
