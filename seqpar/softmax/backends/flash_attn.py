"""Attention over slices with the package flash-attn (Dao's FlashAttention-2), if it is installed.

It computes full and causal pieces, in bf16 and fp16 on CUDA. Plain PyTorch computes pieces under a
mask, such as a window, and all pieces with a softcap or ALiBi: the package measures ALiBi's
distances in rows, not in positions. Users who prefer its kernels to ours ask for it with
`seqpar.use_backend("flash_attn")`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import pieces
from seqpar.softmax.backends.aten import BackwardRows, PieceKernels
from seqpar.softmax.backends.pieces import Piece, WorkSplit
from seqpar.softmax.compute.call_options import CallOptions

MAX_HEAD_DIM = 256 - 8  # the gradient of lse takes one more column of v, padded to 8


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why these operands cannot be computed, naming the argument, or None."""
    backend = 'the backend "flash_attn"'
    if importlib.util.find_spec("flash_attn") is None:
        package = "the package flash-attn, which is not installed"
        return f"{backend} needs {package}: pip install flash-attn"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        actual = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {actual}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        limit = f"head dims of at most {MAX_HEAD_DIM}"
        return f"q and v must have {limit} for {backend}, got {q.shape[-1]}"
    return None


def _split_work(q: Tensor, value_dim: int, slices: Slices, options: CallOptions) -> WorkSplit:
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
    rows: BackwardRows, piece: Piece, slices: Slices, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn import flash_attn_interface

    dout, q, out, lse, k, v = rows
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lse = lse.transpose(1, 2).contiguous()
    flash_attn_interface._flash_attn_backward(
        dout.contiguous(), q, k, v, out, lse, dq, dk, dv, 0.0, options.scale,
        causal=piece.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, deterministic=options.deterministic,
    )  # fmt: skip
    return dq, dk, dv


_KERNELS = PieceKernels(_split_work, _forward, _backward)
forward, backward = _KERNELS.merge_forward, _KERNELS.add_gradients
forward_blocks = None  # `attend_blocks` calls `forward` for each block
