"""Pack rows of tensors into a message of 8-bit codes and fp32 scales, and unpack a message.

Each row of a part, such as k or v, has its own scale s = largest absolute value / largest code. An
element x becomes the code nearest to x / s: an int8 integer, or an e4m3 float of 4 exponent and 3
mantissa bits (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3). Codes are
computed in integer arithmetic, because the instructions for e4m3 do not exist before sm_89. For
finite rows, the bytes and the decoded elements are equal to those of PyTorch on a CPU.

A message is (N, B, H, W), without gaps. Along its last dimension, the codes of all parts come
first, and the scales of all parts follow. Kernels number the rows (n, b, h) of a message in this
order. Strides are arguments named `operand_dimension`, in elements, with the dimensions b batch, t
rows, h heads and d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import DTYPES, Shapes, check_list
from ..specialisation import kernel
from .configs import padded
from .launching import Prepared, run, strides
from .merge_hops import kept_call
from .tiles import within

LARGEST_CODES = {torch.int8: 127, torch.float8_e4m3fn: 448}
_SCALE_BYTES = 4
_TILE_ELEMENTS = 4096  # elements of a part per program
_INFINITY_BITS = tl.constexpr(0x7F800000)  # the bits of infinity in fp32
_LEAST_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2⁻⁶ in fp32: the least normal e4m3 number
# For abs(x) < 2²², x + 1.5 · 2²³ is rounded to an integer, halves to the even one.
_ROUNDS_TO_INTEGERS = tl.constexpr(12582912.0)
# For abs(x) < 2⁻⁶, x + 2¹⁴ is rounded to a multiple of 2⁻⁹, the distance of subnormal e4m3 numbers.
_ROUNDS_TO_SUBNORMALS = tl.constexpr(16384.0)
_SUBNORMALS_BITS = tl.constexpr(0x46800000)  # the bits of 2¹⁴ in fp32
_EXPONENT_STEP = tl.constexpr(2.0**120)  # fp32 exponents have a bias of 127, and those of e4m3 of 7


@triton.jit
def e4m3_code(x):
    """Return the e4m3 codes, as int8, of x, which is NaN or has abs(x) ≤ 448, rounded to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    normal = ((magnitude + 0x7FFFF + odd) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) + _ROUNDS_TO_SUBNORMALS).to(tl.int32, bitcast=True) - _SUBNORMALS_BITS
    code = tl.where(magnitude < _LEAST_NORMAL_BITS, subnormal, normal)
    code = tl.where(magnitude > _INFINITY_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def e4m3_value(code):
    """Return the fp32 values of e4m3 codes (int8)."""
    bits = code.to(tl.int32)
    value = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * _EXPONENT_STEP
    value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def encode_part(
    at, message, scales, valid, stride_d,
    LIMIT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of the rows at addresses `at` to `message` and `scales` (rows,)."""
    d, four = tl.arange(0, BLOCK), tl.arange(0, 4)
    mask = within(valid, d, DIM, BLOCK)
    x = tl.load(at[:, None] + d[None, :] * stride_d, mask=mask, other=0.0).to(tl.float32)
    # The bits of absolute values, read as integers, have the order of the values. NaN is largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LIMIT * 1.0)
    quotient = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)[:, None])
    # A quotient exceeds the limit if a subnormal scale was rounded down.
    limited = tl.minimum(tl.maximum(quotient, -LIMIT * 1.0), LIMIT * 1.0)
    if LIMIT == 127:
        limited = tl.where(quotient == quotient, limited, 0.0)
        code = (limited + _ROUNDS_TO_INTEGERS - _ROUNDS_TO_INTEGERS).to(tl.int8)
    else:
        code = e4m3_code(tl.where(quotient == quotient, limited, quotient))
    tl.store(message[:, None] + d[None, :], code, mask=mask)
    scale_bytes = scale.to(tl.int32, bitcast=True)[:, None] >> (four * 8)[None, :]
    tl.store(scales[:, None] + four[None, :], scale_bytes.to(tl.int8), mask=valid[:, None])


@triton.jit
def decode_part(
    message, scales, valid, at, LIMIT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the decoded rows of `message` and `scales` (rows,) to the addresses `at` (rows,)."""
    d, four = tl.arange(0, BLOCK), tl.arange(0, 4)
    mask = within(valid, d, DIM, BLOCK)
    code = tl.load(message[:, None] + d[None, :], mask=mask, other=0)
    scale_bytes = tl.load(scales[:, None] + four[None, :], mask=valid[:, None], other=0)
    scale_bits = tl.sum((scale_bytes.to(tl.int32) & 0xFF) << (four * 8)[None, :], 1)
    value = code.to(tl.float32) if LIMIT == 127 else e4m3_value(code)
    value *= scale_bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(at[:, None] + d[None, :], value.to(at.dtype.element_ty), mask=mask)


@kernel
def flash_encode_rows(
    first, second, index, message, rows_total, batch, heads,
    k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    LIMIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Encode TILE_ROWS of the `rows_total` rows of a message; for shapes see `encode_rows`.

    The strides of the first part are those of k, and of the second part, if DV > 0, those of v.
    """
    own = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid = own < rows_total
    head, batch_row = (own % heads).to(tl.int64), own // heads
    b, t = (batch_row % batch).to(tl.int64), (batch_row // batch).to(tl.int64)
    if INDEXED:
        t = tl.load(index + t, mask=valid, other=0)
    message += own.to(tl.int64) * WIDTH
    scales = message + (D + DV)
    at = first + b * k_b + t * k_t + head * k_h
    encode_part(at, message, scales, valid, k_d, LIMIT, D, BLOCK_D)
    if DV > 0:
        at = second + b * v_b + t * v_t + head * v_h
        encode_part(at, message + D, scales + 4, valid, v_d, LIMIT, DV, BLOCK_DV)


@kernel
def flash_decode_rows(
    message, first, second, rows_total,
    LIMIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Decode TILE_ROWS of the `rows_total` rows of a message; for shapes see `decode_rows`."""
    own = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    valid = own < rows_total
    message += own * WIDTH
    scales = message + (D + DV)
    decode_part(message, scales, valid, first + own * D, LIMIT, D, BLOCK_D)
    if DV > 0:
        decode_part(message + D, scales + 4, valid, second + own * DV, LIMIT, DV, BLOCK_DV)


def encode_rows(
    parts: Sequence[Tensor], index: Tensor | None, code: torch.dtype, message: Tensor
) -> None:
    """Write rows of one or two parts to a message, in 8 bits.

    Parts are (B, T, H, D) and (B, T, H, Dv), in bf16, fp16 or fp32. The rows are index[0] … index[N
    − 1], where `index` is int64 (N,), or all rows if `index` is None. `code` is torch.int8 or
    torch.float8_e4m3fn. The message is int8 and contiguous: (N, B, H, D + Dv + 8) for two parts,
    and (N, B, H, D + 4) for one part.
    """
    check_list("parts", parts, Tensor)
    _check_code(code)
    prepare = lambda *_: _prepare_encoding(parts, index, code, message)  # noqa: E731
    launch: Prepared | None = kept_call(("encode", code), (*parts, index, message), prepare)
    if launch is not None:
        run(launch, parts[0], parts[-1], message if index is None else index, message)


def _prepare_encoding(
    parts: Sequence[Tensor], index: Tensor | None, code: torch.dtype, message: Tensor
) -> Prepared | None:
    shapes = Shapes()
    for i, part in enumerate(parts):
        shapes.check(f"parts[{i}]", part, f"B T H D{i}", DTYPES)
    if index is not None:
        shapes.check("index", index, "N", (torch.int64,))
    shapes.check("message", message, f"{'T' if index is None else 'N'} B H W", (torch.int8,))
    flags = _flags(parts, code, message)
    if not message.numel():
        return None
    rows, batch, heads, _ = message.shape
    of_parts = (x for part in (parts[0], parts[-1]) for x in (*strides(part, 3), part.stride(3)))
    arguments = rows * batch * heads, batch, heads, *of_parts
    grid = (triton.cdiv(arguments[0], flags["TILE_ROWS"]),)
    flags["INDEXED"] = index is not None
    return Prepared(flash_encode_rows, grid, message.device, arguments, flags)


def decode_rows(message: Tensor, code: torch.dtype, parts: Sequence[Tensor]) -> None:
    """Write the rows of a message that `encode_rows` made to one or two parts.

    Parts are (N, B, H, D) and (N, B, H, Dv), contiguous, in bf16, fp16 or fp32. Each element is
    rounded once to the dtype of its part. The message (N, B, H, D + Dv + 8) is contiguous.
    """
    check_list("parts", parts, Tensor)
    _check_code(code)
    prepare = lambda *_: _prepare_decoding(message, code, parts)  # noqa: E731
    launch: Prepared | None = kept_call(("decode", code), (message, *parts), prepare)
    if launch is not None:
        run(launch, message, parts[0], parts[-1])


def _prepare_decoding(
    message: Tensor, code: torch.dtype, parts: Sequence[Tensor]
) -> Prepared | None:
    shapes = Shapes()
    shapes.check("message", message, "N B H W", (torch.int8,))
    for i, part in enumerate(parts):
        shapes.check(f"parts[{i}]", part, f"N B H D{i}", DTYPES)
        if not part.is_contiguous():
            raise ValueError(f"parts[{i}] must be contiguous, got strides {part.stride()}")
    flags = _flags(parts, code, message)
    if not message.numel():
        return None
    rows = message.shape[:3].numel()
    grid = (triton.cdiv(rows, flags["TILE_ROWS"]),)
    return Prepared(flash_decode_rows, grid, message.device, (rows,), flags)


def _check_code(code: torch.dtype) -> None:
    if not isinstance(code, torch.dtype) or code not in LARGEST_CODES:
        raise ValueError(f"code must be one of {list(LARGEST_CODES)}, got {code!r:.200}")


def _flags(parts: Sequence[Tensor], code: torch.dtype, message: Tensor) -> dict[str, int]:
    """Check what both kernels require, and return the kernels' compile-time arguments."""
    if not 1 <= len(parts) <= 2 or not all(part.shape[3] for part in parts):
        shown = [tuple(part.shape) for part in parts]
        raise ValueError(f"parts must be one or two tensors with columns, got shapes {shown}")
    if message.shape[:3].numel() > 2**30:  # kernels number rows in int32
        raise ValueError(f"message must have at most 2**30 rows, got shape {tuple(message.shape)}")
    dims = [part.shape[3] for part in parts]
    width = sum(dims) + _SCALE_BYTES * len(dims)
    if message.shape[3] != width or not message.is_contiguous():
        found = f"{tuple(message.shape)} with strides {message.stride()}"
        raise ValueError(f"message must be contiguous with W = {width}, got {found}")
    dim, value_dim = dims[0], sum(dims[1:])
    block, value_block = padded(dim), padded(value_dim or 1)
    return {
        "LIMIT": LARGEST_CODES[code], "D": dim, "BLOCK_D": block, "DV": value_dim,
        "BLOCK_DV": value_block, "WIDTH": width,
        "TILE_ROWS": max(1, _TILE_ELEMENTS // max(block, value_block)),
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
