"""Attention over slices with ATen's fused kernels.

On CPU the kernel is `_scaled_dot_product_flash_attention_for_cpu`. It takes half precision too, but
on many CPUs it is faster in fp32 (`cpu.py`), so inputs are cast and results rounded at the end. On
CUDA it is FlashAttention-2, for half-precision pieces without a mask. Plain PyTorch computes what
the kernels cannot: other pieces on CUDA, ALiBi there, and a softcap.

Legend: B batch, T rows, n query rows and m key rows of a piece (`pieces.py`), H heads (Hq of
queries, Hkv of keys and values), D head dim (Dv of values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.core.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    cuda_attention,
    cuda_attention_backward,
)
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import cpu, pieces, reference
from seqpar.softmax.backends.biased_pieces import all_biased, with_bias
from seqpar.softmax.backends.determinism import deterministic_kernels
from seqpar.softmax.backends.pieces import Piece, WorkSplit
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256  # on CUDA

forward_blocks = None  # `attend_blocks` calls `forward` for each block
# A fused kernel for one piece: `_forward` and `_backward` show the arguments and results.
Kernel = Callable[..., tuple[Tensor, ...]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    """Merge into `partial` the attention of q (B, T, Hq, D) over k and v; see `attend`."""
    split = _split_work(q, v.shape[-1], slices, options)
    forward_by(_forward, split, q, k, v, slices, partial, options)


def forward_by(
    kernel: Kernel,
    split: WorkSplit,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    partial: Partial,
    options: CallOptions,
) -> None:
    """Merge into `partial`, as `forward` does, with a kernel that computes out and lse of a piece.

    The kernel's lse is −inf where a row sees no key. `split` says which pieces it computes.
    """
    if split.plain is not None:
        reference.forward(q, k, v, split.plain, partial, options)
    value_dim, width = v.shape[-1], _width(q, v)
    q, options, _ = _positive_scale(q, options)
    q, k, v = (_pad(x, width) for x in (q, k, v))
    for piece in split.fused:
        rows, keys = piece.rows, piece.keys
        out, lse = kernel(q[:, rows], k[:, keys], v[:, keys], piece, slices, options)
        first = piece.first and partial.empty and split.plain is None
        (partial.put if first else partial.merge)(rows, out[..., :value_dim], lse)


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
    value_dim = v.shape[-1] + (output.dlse is not None)  # see `backward_by`
    split = _split_work(q, value_dim, slices, options)
    switch = deterministic_kernels if q.is_cuda and options.deterministic else nullcontext
    backward_by(_backward, split, output, q, k, v, slices, gradients, options, switch)


def backward_by(
    kernel: Kernel,
    split: WorkSplit,
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
    switch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Add to `gradients`, as `backward` does, with a kernel that computes dq, dk and dv of a piece.

    It runs within the context that `switch` makes.

    Fused kernels take no gradient of lse. Here it is added to dout·v: v gets a column of ones, dout
    one of dlse, and out one of zeros.
    """
    if split.plain is not None:
        reference.backward(output, q, k, v, split.plain, gradients, options)
    dim, value_dim, dout = q.shape[-1], v.shape[-1], output.dout
    if output.dlse is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        dout = torch.cat([dout, output.dlse[..., None].to(dout.dtype)], -1)
    width = _width(q, v)
    q, options, sign = _positive_scale(q, options)
    q, k, v, dout, out = (_pad(x, width) for x in (q, k, v, dout, output.ensure_out()))
    if not split.fused:
        return
    with switch():
        for piece in split.fused:
            rows, keys = piece.rows, piece.keys
            of_queries = dout[:, rows], q[:, rows], out[:, rows], output.lse[:, rows]
            dq, dk, dv = kernel(*of_queries, k[:, keys], v[:, keys], piece, slices, options)
            gradients.dq[:, rows].add_(dq[..., :dim], alpha=sign)
            gradients.dk[:, keys] += dk[..., :dim]
            gradients.dv[:, keys] += dv[..., :value_dim]


@cache
def is_recent(device: torch.device) -> bool:
    """Return whether a GPU is one that FlashAttention-2 runs on: sm_80 and up."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def fuses(q: Tensor, *head_dims: int, softcap: float) -> bool:
    """Return whether ATen's kernel on CUDA computes pieces without a mask, of these operands."""
    fits = q.dtype in _HALF and max(head_dims) <= _MAX_HEAD_DIM
    return fits and not softcap and is_recent(q.device)


def _split_work(q: Tensor, value_dim: int, slices: Slices, options: CallOptions) -> WorkSplit:
    """Return what ATen's kernel computes, and what is left to plain PyTorch."""
    biased = options.slopes is not None
    if q.is_cuda:
        if not biased and fuses(q, q.shape[-1], value_dim, softcap=options.softcap):
            return pieces.unmasked_fused(slices)
        return pieces.all_plain(slices)
    if options.softcap:
        return pieces.all_plain(slices)
    return all_biased(slices, q.shape[0] * q.shape[2]) if biased else pieces.all_fused(slices)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, slices: Slices, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """Return out (B, n, Hq, D) and lse (B, n, Hq) of a piece."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    arguments = {"dropout_p": 0.0, "is_causal": piece.causal, "scale": options.scale}
    if q.is_cuda:
        out, lse, *_ = cuda_attention()(q, k, v, **arguments)
        return out.transpose(1, 2), lse.transpose(1, 2)
    slopes = options.slopes
    if q.dtype in _HALF and not (slopes is None and cpu.computes_forward(q.dtype)):
        q, k, v = (x.float() for x in (q, k, v))
    mask, sees_none = pieces.additive_mask(piece, slices, q.dtype, q.device)
    mask, shift = with_bias(mask, piece, slices, slopes)
    out, lse = cpu_attention()(q, k, v, attn_mask=mask, **arguments)
    if q.is_cpu and not (
        math.isfinite(float(out.sum())) and bool((lse.isfinite() & (lse != 0)).all())
    ):
        out, lse = _with_special_rows(out, lse, q, k, v, mask, piece, slices, options.scale)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    lse = lse if shift is None else lse - shift
    return out, lse if sees_none is None else lse.masked_fill(sees_none[:, None], -torch.inf)


def _with_special_rows(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    piece: Piece,
    slices: Slices,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of ATen's CPU kernel with the rows replaced that may not be right.

    The kernel computes a row as if it had no keys (out 0, lse 0 or −inf) if its largest score, as
    it finds it, is −inf. But it overlooks NaN in the last keys that do not fill a vector register.
    And where it masks keys by adding −inf or multiplying by 0, their NaN and infinities reach rows
    that do not attend to them. Tensors are (B, H, rows, …).
    """
    lost = (lse == 0) & (out == 0).all(-1)
    special = lost | ~lse.isfinite() | ~out.isfinite().all(-1)
    rows = special.any(0).any(0).nonzero().flatten()
    out, lse = out.to(torch.promote_types(out.dtype, torch.float32)), lse.clone()
    attended = None
    if piece.band is not None:
        attended = slices.mask(piece.rows, piece.keys, piece.band, q.device)
    step = max(1, reference.MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for part in rows.split(step):
        columns = torch.arange(k.shape[2], device=q.device)
        visible = columns <= part[:, None] if piece.causal else columns[None] >= 0
        if attended is not None:
            visible = attended[part]
        bias = None if mask is None else mask if mask.shape[-2] == 1 else mask[..., part, :]
        exact = reference.attention_of_rows(q[:, :, part], k, v, visible, bias, scale, out.dtype)
        chosen = special[:, :, part]
        out[:, :, part] = torch.where(chosen[..., None], exact[0], out[:, :, part])
        lse[:, :, part] = torch.where(chosen, exact[1].to(lse.dtype), lse[:, :, part])
    return out, lse


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
) -> tuple[Tensor, ...]:
    """Return dq (B, n, Hq, D), dk (B, m, Hkv, D) and dv (B, m, Hkv, Dv) of a piece.

    out and lse are the final ones of its rows, over all keys on all ranks.
    """
    dout, q, k, v, out, lse = (x.transpose(1, 2) for x in (dout, q, k, v, out, lse))
    gradients: tuple[Tensor, ...]
    if q.is_cuda:
        no_random_state = torch.empty(0, dtype=torch.int64, device=q.device)
        gradients = cuda_attention_backward()(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
            0.0, piece.causal, no_random_state, no_random_state, scale=options.scale,
        )  # fmt: skip
    else:
        slopes, half = options.slopes, q.dtype in _HALF
        if half and not (slopes is None and cpu.computes_backward(q.dtype, piece.query_end)):
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        mask, _ = pieces.additive_mask(piece, slices, q.dtype, q.device)
        mask, shift = with_bias(mask, piece, slices, slopes)
        lse = lse if shift is None else (lse + shift.transpose(1, 2)).to(lse.dtype)
        gradients = cpu_attention_backward()(
            dout, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=options.scale
        )
    return tuple(x.transpose(1, 2) for x in gradients)


def _positive_scale(q: Tensor, options: CallOptions) -> tuple[Tensor, CallOptions, int]:
    """Return q and the options with a positive scale that give the same scores, and its sign.

    Fused kernels scale after masking, so a scale of 0 or below would make −∞ NaN or +∞. dq of the
    new q becomes that of q when multiplied by the sign.
    """
    if options.scale > 0:
        return q, options, 1
    sign = -1 if options.scale else 0
    return q * sign, replace(options, scale=-options.scale or 1.0), sign


def _width(q: Tensor, v: Tensor) -> int:
    """Return the head dim to which q, k and v are padded: fused kernels take one for all three.

    On CUDA, and where D and Dv differ, it is a multiple of 8.
    """
    width = max(q.shape[-1], v.shape[-1])
    return width if q.shape[-1] == v.shape[-1] and not q.is_cuda else -(-width // 8) * 8


def _pad(x: Tensor, width: int) -> Tensor:
    """Return x, with zeros behind it up to this head dim."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
