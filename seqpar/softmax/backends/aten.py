"""The backend "aten": attention with the fused kernels of PyTorch's library ATen.

On CPUs, the kernel is `_scaled_dot_product_flash_attention_for_cpu`. Many CPUs compute faster in
fp32 than in half precision. On these CPUs, inputs are cast to fp32, and results are rounded at the
end. On CUDA, the kernels are cuDNN and FlashAttention-2 (`aten_cuda.py`). Calls with a softcap are
computed in plain PyTorch.

Letters of shapes: B is the batch, T the number of rows, n and m the numbers of query rows and key
rows of one kernel call, Hq and Hkv the numbers of query heads and KV heads, D the head dim of q and
k, and Dv the head dim of v.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_tables import is_on_cuda
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    cpu_has_bf16_products,
    cpu_has_matrix_units,
)
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten_cuda, pieces, reference
from seqpar.softmax.backends.kernel_operands import (
    joint_head_dim,
    pad_heads,
    positive_scale,
    with_dlse,
    with_lse_columns,
)
from seqpar.softmax.backends.kernel_order import aten_kernel
from seqpar.softmax.backends.pieces import Piece
from seqpar.softmax.backends.varlen import HeadDims, VarlenBlock, VarlenKernel
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

_HALF = (torch.bfloat16, torch.float16)
# If a document has at most this number of queries, backward in half precision runs in fp32. ATen
# rounds dk and dv once per 1,024 queries. If two ranks each round their contribution, the sum has a
# larger error than on one device: 1.41 times the error of ATen on one device with 1,024 queries,
# 1.34 times with 1,152, and 0.87 times with 2,048. The limit counts the queries of the whole
# document, even if a piece has fewer. If 8,192 tokens are on 8 ranks, in pieces of 512 rows, most
# pieces are therefore computed in half precision.
_MAX_QUERIES_ROUNDED_ONCE = 1536
# The kernel rounds lse to fp32, with an error of up to 2⁻²⁴·|lse|. When results are merged, their
# weights are then slightly wrong, and backward does not know it: the gradients of a row's scores no
# longer add up to 0, and dq gets their sum times the average key. With an lse of 16, the error of
# dq is up to 1.2 times the error of a single call. It is up to 2.4 times with an lse of 30, and up
# to 16 times with 1,000. Our limit is 1.35 times. If some lse is larger than 16, a second call of
# the kernel therefore computes lse exactly.
_MAX_ROUNDED_LSE = 16

forward_blocks = None  # `attend_blocks` calls `forward` for each block


# The number of queries of a block in ATen's CPU kernel, by the smallest number of query rows for
# which the kernel uses such blocks.
_BLOCK_QUERIES = {768: 256, 192: 64, 0: 32}
_BLOCK_KEYS = 512


class _BackwardRows(NamedTuple):
    """The rows of a `Piece` that the backward kernel reads, each (B, n or m, H, D).

    out and lse are the results of the whole forward, over all keys on all ranks.
    """

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    k: Tensor
    v: Tensor


def prepared(q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> VarlenBlock | None:
    """Return the object that computes one block on a GPU that runs FlashAttention-2.

    On all other devices the result is None, and `forward` and `backward` of this module compute the
    block.
    """
    if not aten_cuda.computes(q):
        return None
    kernel = aten_kernel(q, v, slices, options)
    kernels: dict[bool, VarlenKernel | None] = {
        has_dlse: kernel if kernel.takes(HeadDims.of(q, v), options, has_dlse) else None
        for has_dlse in (False, True)
    }
    return VarlenBlock(kernels, q, v, slices)


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    if is_on_cuda(q) or options.softcap:
        reference.forward(q, k, v, slices, partial, options)
        return
    value_dim, width = v.shape[-1], _head_dim(q, v)
    q, options, _ = positive_scale(q, options)
    q, k, v = (pad_heads(x, width) for x in (q, k, v))
    all_pieces = _pieces_of(q, slices, options)
    merges = not partial.single or len(all_pieces) > 1
    for piece in all_pieces:
        rows, keys = piece.rows, piece.keys
        partial.make_room(rows.stop - rows.start, q.dtype)
        operands = q[:, rows], k[:, keys], v[:, keys]
        out, lse = _forward(*operands, piece, slices, options, merges)
        out = out[..., :value_dim]
        if piece.first and partial.empty:
            partial.put(rows, out, lse)
        else:
            partial.merge(rows, out, lse, is_owned=True)


def backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    if is_on_cuda(q) or options.softcap:
        reference.backward(output, q, k, v, slices, gradients, options)
        return
    dim, value_dim, dout = q.shape[-1], v.shape[-1], output.dout
    if output.dlse is not None:
        v, dout = with_lse_columns(v), with_dlse(dout, output.dlse)
    width = _head_dim(q, v)
    q, options, sign = positive_scale(q, options)
    q, k, v, dout, out = (pad_heads(x, width) for x in (q, k, v, dout, output.ensure_out()))
    for piece in _pieces_of(q, slices, options):
        rows, keys = piece.rows, piece.keys
        operands = _BackwardRows(
            dout[:, rows], q[:, rows], out[:, rows], output.lse[:, rows], k[:, keys], v[:, keys]
        )
        dq, dk, dv = _backward(operands, piece, slices, options)
        gradients.dq[:, rows].add_(dq[..., :dim], alpha=sign)
        gradients.dk[:, keys] += dk[..., :dim]
        gradients.dv[:, keys] += dv[..., :value_dim]


def _pieces_of(q: Tensor, slices: Slices, options: CallOptions) -> list[Piece]:
    if options.slopes is None:
        return pieces.cut_slices(slices)
    return pieces.cut_biased_slices(slices, q.shape[0] * q.shape[2])


def _head_dim(q: Tensor, v: Tensor) -> int:
    """Return the head dim to which q, k and v are padded.

    This is D if D and Dv are equal. If they differ, it is the smallest multiple of 8 that is at
    least D and Dv.
    """
    return q.shape[-1] if q.shape[-1] == v.shape[-1] else joint_head_dim(q, v)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    slices: Slices,
    options: CallOptions,
    merges: bool,
) -> tuple[Tensor, Tensor]:
    """Return out (B, n, Hq, Dv) and lse (B, n, Hq) of a piece, a rectangle of query rows and key
    rows.

    If `merges` is True, the caller will merge the result with results over further keys. In this
    case, lse is in fp64 if fp32 is not accurate enough for some row.
    """
    exact = merges and q.is_cpu and q.dtype == torch.float32
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal, scale = piece.causal, options.scale
    arguments: dict[str, Any] = {"dropout_p": 0.0, "is_causal": causal, "scale": scale}
    slopes = options.slopes
    if q.dtype in _HALF and not (slopes is None and half_is_faster_in_forward(q.dtype)):
        q, k, v = (x.float() for x in (q, k, v))
    mask, without_keys = pieces.additive_mask(piece, slices, q.dtype, q.device)
    mask, shift = pieces.with_bias(mask, piece, slices, slopes)
    out, lse = cpu_attention()(q, k, v, attn_mask=mask, **arguments)
    if q.is_cpu and not (
        math.isfinite(float(out.sum())) and bool((lse.isfinite() & (lse != 0)).all())
    ):
        out, lse = _with_special_rows((out, lse), (q, k, v), mask, piece, slices, options.scale)
    if exact and bool(((lse.abs() > _MAX_ROUNDED_LSE) & lse.isfinite()).any()):
        lse = _exact_lse(lse, q, k, v, mask, arguments)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    lse = lse if shift is None else lse - shift
    return out, lse if without_keys is None else lse.masked_fill(without_keys[:, None], -torch.inf)


def _exact_lse(
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    arguments: dict[str, Any],
) -> Tensor:
    """Return the lse (B, Hq, n) of a kernel call in fp64, given the lse that the kernel rounded to
    fp32.

    The kernel runs again, with the rounded lse of each row subtracted from the scores of the row.
    The lse of the second run is the rounding error of the first lse. Because this error is close to
    0, fp32 represents it accurately.
    """
    rounded = lse.nan_to_num(0.0, 0.0, 0.0)[..., None]
    if mask is None:
        rest = cpu_attention()(q, k, v, attn_mask=-rounded, **arguments)[1]
    else:  # One head at a time: a mask for all heads would take as much memory as their scores.
        masks = mask.expand(*rounded.shape[:3], k.shape[2])
        rests = []
        for i in range(q.shape[1]):
            head, kv_head = (slice(j, j + 1) for j in (i, i * k.shape[1] // q.shape[1]))
            operands = q[:, head], k[:, kv_head], v[:, kv_head]
            shifted = masks[:, head] - rounded[:, head]
            rests.append(cpu_attention()(*operands, attn_mask=shifted, **arguments)[1])
        rest = torch.cat(rests, 1)
    exact = lse.double()
    return torch.where(rest.isfinite(), exact + rest, exact)


def _with_special_rows(
    result: tuple[Tensor, Tensor],
    operands: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    piece: Piece,
    slices: Slices,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the out and lse in `result`, after wrong rows of ATen's CPU kernel were computed
    again.

    The kernel is wrong in two cases. If the largest score that it finds in a row is −inf, it
    returns the result of a row without keys, even if the row has a NaN. A NaN or an infinity in a
    masked key reaches rows that do not attend to this key.

    `result` and `operands` are (B, H, rows, …).
    """
    (out, lse), (q, k, v) = result, operands
    no_keys = (lse == 0) & (out == 0).all(-1)
    special = no_keys | ~lse.isfinite() | ~out.isfinite().all(-1)
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
    rows: _BackwardRows, piece: Piece, slices: Slices, options: CallOptions
) -> tuple[Tensor, ...]:
    dout, q, out, lse, k, v = (x.transpose(1, 2) for x in rows)
    slopes, half = options.slopes, q.dtype in _HALF
    if half and not (slopes is None and half_is_faster_in_backward(q.dtype, piece.query_end)):
        dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    mask, _ = pieces.additive_mask(piece, slices, q.dtype, q.device)
    mask, shift = pieces.with_bias(mask, piece, slices, slopes)
    lse = lse if shift is None else (lse + shift.transpose(1, 2)).to(lse.dtype)
    gradients = cpu_attention_backward()(
        dout, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=options.scale
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def forward_buffer_bytes(q: Tensor, k: Tensor) -> int:
    """Return how many bytes of buffers ATen's CPU kernel allocates in one thread during forward.

    q is (B, Hq, n, D), and k is (B, Hkv, m, D). Two kinds of buffers are not counted: buffers of
    oneDNN for products in half precision, and copies of k and v for matrix units.
    """
    rows, scores = _block(q, k)
    width = 2 + q.shape[3]
    itemsize = accumulator_dtype(q.dtype).itemsize
    half = scores * q.itemsize if q.dtype in _HALF else 0
    return (scores + rows * width) * itemsize + half


def backward_buffer_bytes(dout: Tensor, q: Tensor, k: Tensor) -> int:
    """Return how many bytes of buffers ATen's CPU kernel allocates in one thread during backward.

    dout is (B, n, Hq, D), q is (B, Hq, n, D), and k is (B, Hkv, m, D). If dout is not contiguous,
    the kernel copies dout, and the copy is counted.
    """
    rows, scores = _block(q, k)
    itemsize = accumulator_dtype(q.dtype).itemsize
    half = 2 * scores * q.itemsize if q.dtype in _HALF else 0
    copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.nbytes
    return (2 * scores + rows) * itemsize + half + copied


def _block(q: Tensor, k: Tensor) -> tuple[int, int]:
    rows = next(count for least, count in _BLOCK_QUERIES.items() if q.shape[2] >= least)
    rows = min(rows, q.shape[2])
    return rows, rows * min(_BLOCK_KEYS, k.shape[2])


def half_is_faster_in_forward(dtype: torch.dtype) -> bool:
    """Return whether this CPU computes forward faster in `dtype` than in fp32 with casts."""
    return dtype == torch.bfloat16 and cpu_has_matrix_units()


def half_is_faster_in_backward(dtype: torch.dtype, query_end: int) -> bool:
    """Return whether this CPU computes backward faster in `dtype` than in fp32, and accurately
    enough.

    `query_end` is the position after the last query.
    """
    long_enough = query_end > _MAX_QUERIES_ROUNDED_ONCE
    return long_enough and dtype == torch.bfloat16 and _backward_is_faster()


@cache
def _backward_is_faster() -> bool:
    # On Intel CPUs, a product in bf16 takes longer than one in fp32, unless matrix units (AMX)
    # compute it. The speed of computing in fp32 with casts, relative to ATen in bf16: on a Xeon
    # with AVX512 and without AMX, 1.0 to 1.6 times in forward and 2 to 4 times in backward. With
    # AVX512_BF16, and AMX switched off in oneDNN, 1.4 times in forward and 1.6 times in backward.
    # In the second case, forward and backward together over 2,048 and 4,096 tokens have 1.34 and
    # 1.41 times the speed of SDPA if computed in fp32, and 0.98 and 1.03 times with a backward in
    # bf16. Other makers' tables say that a product in bf16 takes half as long as one in fp32; none
    # of their CPUs was measured.
    return cpu_has_matrix_units() or (cpu_has_bf16_products() and _cpu_vendor() != "GenuineIntel")


def _cpu_vendor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
