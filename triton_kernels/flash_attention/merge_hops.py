"""Add one hop's results to the sums over earlier hops.

Forward merges a result into a partial result over other keys, with out in fp32 and lse in fp64
(docs/decisions/softmax.md has the reason). For each row, with p = sigmoid(lse − partial_lse):
partial_out += p (out − partial_out) and partial_lse = log(exp(partial_lse) + exp(lse)). Backward
adds gradients to rows in fp32.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads;
rows of DV elements are contiguous. Operands: o is out, w is lse, p is partial_out, r is
partial_lse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import DTYPES, Shapes, check_int, check_rows
from ..specialisation import kernel
from .configs import padded
from .launching import Prepared, run, signature, strides
from .tiles import rows_of_program, within

_LEAST = tl.constexpr(-1.7976931348623157e308)  # the least finite number of fp64
_TILE_ELEMENTS = 4096  # of out, per program


@kernel
def flash_accumulate(
    out, lse, partial_out, partial_lse, index, rows_total, heads,
    o_b, o_t, o_h, w_b, w_t, w_h, p_b, p_t, p_h, r_b, r_t, r_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """Merge TILE_ROWS of the `rows_total` rows of one head; for shapes see `accumulate`."""
    batch, head, _, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    dv = tl.arange(0, BLOCK_DV)
    targets = tl.load(index + rows, mask=valid, other=0) if HAS_INDEX else rows
    at_lse = partial_lse + batch * r_b + head * r_h + targets * r_t
    old = tl.load(at_lse, mask=valid, other=0.0)
    new = tl.load(lse + batch * w_b + head * w_h + rows * w_t, mask=valid, other=0.0).to(tl.float64)
    # A row without keys on both sides keeps out 0 and lse −∞; a NaN on either side stays NaN.
    difference = new - tl.where(old == float("-inf"), _LEAST, old)
    ratio = tl.exp(-tl.abs(difference))
    weight = (tl.where(difference < 0.0, ratio, 1.0) / (1.0 + ratio)).to(tl.float32)
    larger = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
    tl.debug_barrier()  # several warps read the old lse of a row, and one of them replaces it
    tl.store(at_lse, larger + tl.log(1.0 + ratio), mask=valid)
    mask = within(valid, dv, DV, BLOCK_DV)
    out += batch * o_b + head * o_h
    values = tl.load(out + rows[:, None] * o_t + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    at_out = partial_out + batch * p_b + head * p_h + targets[:, None] * p_t + dv[None, :]
    before = tl.load(at_out, mask=mask, other=0.0)
    weight, change = weight[:, None], values - before
    nearer = tl.where(weight < 0.5, before + weight * change, values - (1.0 - weight) * change)
    tl.store(at_out, nearer, mask=mask)


def accumulate(
    out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor, index: Tensor | None = None
) -> None:
    """Merge out and lse into a partial result over other keys, in place.

    out is (B, N, H, Dv) in bf16, fp16 or fp32, and lse (B, N, H) in fp32 or fp64. partial_out
    (B, T, H, Dv) is fp32 and partial_lse (B, T, H) fp64. Row i belongs to row index[i] of the
    partial result; `index` is int64 (N,) without repetition. Without it N is T, and rows
    correspond.
    """
    tensors = out, lse, partial_out, partial_lse, index
    launch: Prepared | None = kept_call("accumulate", tensors, _prepare_accumulate)
    if launch is not None:
        out = out if out.stride(3) == 1 else out.contiguous()
        run(launch, out, lse, partial_out, partial_lse, lse if index is None else index)


def _prepare_accumulate(
    out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor, index: Tensor | None
) -> Prepared | None:
    _check(out, lse, partial_out, partial_lse, index)
    out = out if out.stride(3) == 1 else out.contiguous()
    batch, rows, heads, value_dim = out.shape
    if not out.numel():
        return None
    tile_rows = max(1, _TILE_ELEMENTS // padded(value_dim))
    of_operands = (stride for x in (out, lse, partial_out, partial_lse) for stride in strides(x, 3))
    flags = {
        "DV": value_dim, "BLOCK_DV": padded(value_dim), "TILE_ROWS": tile_rows,
        "HAS_INDEX": index is not None, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    grid = (triton.cdiv(rows, tile_rows) * batch * heads,)
    return Prepared(flash_accumulate, grid, out.device, (rows, heads, *of_operands), flags)


@kernel
def flash_add_to_rows(
    part, total, index, rows_total, heads, sign, o_b, o_t, o_h, p_b, p_t, p_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Add TILE_ROWS of the `rows_total` rows of one head; for shapes see `add_to_rows`."""
    batch, head, _, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    dv = tl.arange(0, BLOCK_DV)
    targets = tl.load(index + rows, mask=valid, other=0)
    mask = within(valid, dv, DV, BLOCK_DV)
    part += batch * o_b + head * o_h
    values = tl.load(part + rows[:, None] * o_t + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    at = total + batch * p_b + head * p_h + targets[:, None] * p_t + dv[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + values * sign, mask=mask)


def add_to_rows(part: Tensor, total: Tensor, index: Tensor, sign: int) -> None:
    """Add sign · part (B, N, H, D) to the rows index[0] … index[N − 1] of a total, in place.

    The total (B, T, H, D) is fp32, the part bf16, fp16 or fp32, and `index` int64 (N,) without
    repetition.
    """
    check_int("sign", sign, -1)
    launch: Prepared | None = kept_call(
        ("add to rows", sign), (part, total, index), _prepare_adding, sign
    )
    if launch is not None:
        run(launch, part, total, index)


def _prepare_adding(part: Tensor, total: Tensor, index: Tensor, sign: int) -> Prepared | None:
    shapes = Shapes()
    shapes.check("part", part, "B N H D", DTYPES)
    shapes.check("total", total, "B T H D", (torch.float32,))
    shapes.check("index", index, "N", (torch.int64,))
    check_rows("part", part)
    check_rows("total", total)
    if not part.numel():
        return None
    batch, rows, heads, dim = part.shape
    tile_rows = max(1, _TILE_ELEMENTS // padded(dim))
    arguments = rows, heads, sign, *strides(part, 3), *strides(total, 3)
    flags = {
        "DV": dim, "BLOCK_DV": padded(dim), "TILE_ROWS": tile_rows, "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip
    grid = (triton.cdiv(rows, tile_rows) * batch * heads,)
    return Prepared(flash_add_to_rows, grid, part.device, arguments, flags)


_MOST_KEPT = 1024
_calls: dict[Hashable, Any] = {}  # prepared calls; there are no tables to keep them with


def kept_call(
    kind: Hashable, tensors: Sequence[Tensor | None], prepare: Callable[..., Any], *arguments: Any
) -> Any:
    """Return `prepare(*tensors, *arguments)`, kept for tensors of this signature."""
    key = kind, signature(*tensors)
    call = _calls.get(key)
    if call is None:
        call = prepare(*tensors, *arguments)
        if len(_calls) >= _MOST_KEPT:
            _calls.clear()  # other threads keep what they have read
        _calls[key] = call
    return call


def _check(
    out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor, index: Tensor | None
) -> None:
    rows, shapes = "T" if index is None else "N", Shapes()
    shapes.check("out", out, f"B {rows} H Dv", DTYPES)
    shapes.check("lse", lse, f"B {rows} H", (torch.float32, torch.float64))
    shapes.check("partial_out", partial_out, "B T H Dv", (torch.float32,))
    shapes.check("partial_lse", partial_lse, "B T H", (torch.float64,))
    check_rows("partial_out", partial_out)
    if index is not None:
        shapes.check("index", index, "N", (torch.int64,))
