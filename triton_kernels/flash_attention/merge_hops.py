"""Merge the results of several hops in one pass, and add gradients to sums. A *hop* is the
attention of queries over one of several blocks of keys.

Forward merges results over different keys into one result, with out in fp32 and lse in fp64
(docs/decisions/softmax.md has the reason). For each row and for one hop after another, with
p = sigmoid(lse − total_lse):

    total_out += p (out − total_out)
    total_lse = log(exp(total_lse) + exp(lse))

A kernel reads the results of up to `MOST_HOPS` hops, in the dtype of the kernels that computed
them, and writes the merged result once. Backward adds gradients to rows in fp32.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads;
rows of DV elements are contiguous. Operands: o is a hop's out, w a hop's lse, p partial_out, r
partial_lse, z the merged out and l the merged lse. A number at the end of a name is that of a hop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import DTYPES, Shapes, check_int, check_list, check_rows
from ..specialisation import kernel
from .arguments import ACCUMULATORS
from .configs import padded
from .launching import Prepared, run, signature, strides
from .tiles import rows_of_program, within

MOST_HOPS = 8  # hops that one launch merges: the kernel has arguments for so many
_LEAST = tl.constexpr(-1.7976931348623157e308)  # the least finite number of fp64
_LEAST_SINGLE = tl.constexpr(-3.4028234663852886e38)  # the least finite number of fp32
_TILE_ELEMENTS = 4096  # elements of a part per program that adds
# Elements of out per program that merges. With twice as many, some programs spilled 2 KB.
_MERGED_ELEMENTS = 2048


@triton.jit
def rows_of_hop(place, first, count, rows, valid):
    """Return, for each row, the index of this row in the result of a hop, or a negative number.

    The result is (rows,), and is negative for rows that the hop does not have. If `first` is −1,
    the table `place` has these indices. In all other cases, the hop has the rows `first` … `first +
    count − 1`.
    """
    if first < 0:
        own = tl.load(place + rows, mask=valid, other=-1).to(tl.int64)
    else:
        own = tl.where(valid & (rows < first + count), rows - first, -1)
    return own


@triton.jit
def of_hop(i, x0, x1, x2, x3, x4, x5, x6, x7):
    """Return the argument of hop i."""
    first = tl.where(i < 2, tl.where(i < 1, x0, x1), tl.where(i < 3, x2, x3))
    second = tl.where(i < 6, tl.where(i < 5, x4, x5), tl.where(i < 7, x6, x7))
    return tl.where(i < 4, first, second)


@triton.jit
def values_of(out, own, o_t, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return (rows, BLOCK_DV) in fp32: the rows `own` (rows,) from address `out` on.

    A row is 0 where `own` is negative.
    """
    dv = tl.arange(0, BLOCK_DV)
    at_out = out + own[:, None] * o_t + dv[None, :]
    return tl.load(at_out, mask=within(own >= 0, dv, DV, BLOCK_DV), other=0.0).to(tl.float32)


@triton.jit
def merged(total, total_lse, values, lse, own, w_t):
    """Return out (rows, BLOCK_DV) and lse (rows,) after one more hop.

    `values` is the hop's out of one head, and `lse` is the address of the hop's lse of this head.
    `own` (rows,) are the rows in the hop's result, negative where the hop has none.
    """
    has_keys = own >= 0
    new = tl.load(lse + own * w_t, mask=has_keys, other=0.0).to(tl.float64)
    # A row without keys on both sides keeps out 0 and lse −∞; a NaN on either side stays NaN.
    difference = new - tl.where(total_lse == float("-inf"), _LEAST, total_lse)
    ratio = tl.exp(-tl.abs(difference))
    weight = (tl.where(difference < 0.0, ratio, 1.0) / (1.0 + ratio)).to(tl.float32)[:, None]
    larger = tl.maximum(total_lse, new, propagate_nan=tl.PropagateNan.ALL)
    change = values - total
    nearer = tl.where(weight < 0.5, total + weight * change, values - (1.0 - weight) * change)
    larger = tl.where(has_keys, larger + tl.log(1.0 + ratio), total_lse)
    return tl.where(has_keys[:, None], nearer, total), larger


@kernel
def flash_merge_hops(
    out0, out1, out2, out3, out4, out5, out6, out7,
    lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7,
    place0, place1, place2, place3, place4, place5, place6, place7,
    partial_out, partial_lse, out, lse, sinks, rows_total, heads, hops,
    first0, first1, first2, first3, first4, first5, first6, first7,
    count0, count1, count2, count3, count4, count5, count6, count7,
    o_b0, o_b1, o_b2, o_b3, o_b4, o_b5, o_b6, o_b7,
    o_t0, o_t1, o_t2, o_t3, o_t4, o_t5, o_t6, o_t7,
    o_h0, o_h1, o_h2, o_h3, o_h4, o_h5, o_h6, o_h7,
    w_b0, w_b1, w_b2, w_b3, w_b4, w_b5, w_b6, w_b7,
    w_t0, w_t1, w_t2, w_t3, w_t4, w_t5, w_t6, w_t7,
    w_h0, w_h1, w_h2, w_h3, w_h4, w_h5, w_h6, w_h7,
    p_b, p_t, p_h, r_b, r_t, r_h, z_b, z_t, z_h, l_b, l_t, l_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_PARTIAL: tl.constexpr, HAS_SINKS: tl.constexpr,
    ONLY_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge TILE_ROWS of the `rows_total` rows of one head; for shapes see `merge_hops`.

    A loop over the hops selects the arguments of each hop. Unrolled, the loop would need more
    registers than there are.
    With ONLY_ROWS there is one hop, and rows that it lacks are not written.
    """
    batch, head, _, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    dv = tl.arange(0, BLOCK_DV)
    if ONLY_ROWS:
        valid = rows_of_hop(place0, first0, count0, rows, valid) >= 0
    mask = within(valid, dv, DV, BLOCK_DV)
    total_lse = tl.full([TILE_ROWS], float("-inf"), tl.float64)
    if HAS_PARTIAL:
        if HAS_LSE:
            at_lse = partial_lse + batch * r_b + head * r_h + rows * r_t
            total_lse = tl.load(at_lse, mask=valid, other=0.0)
        at_out = partial_out + batch * p_b + head * p_h + rows[:, None] * p_t + dv[None, :]
        total = tl.load(at_out, mask=mask, other=0.0)
    else:
        total = tl.zeros([TILE_ROWS, BLOCK_DV], tl.float32)
    for i in range(hops):
        place = of_hop(i, place0, place1, place2, place3, place4, place5, place6, place7)
        first = of_hop(i, first0, first1, first2, first3, first4, first5, first6, first7)
        count = of_hop(i, count0, count1, count2, count3, count4, count5, count6, count7)
        o_b = of_hop(i, o_b0, o_b1, o_b2, o_b3, o_b4, o_b5, o_b6, o_b7)
        o_t = of_hop(i, o_t0, o_t1, o_t2, o_t3, o_t4, o_t5, o_t6, o_t7)
        o_h = of_hop(i, o_h0, o_h1, o_h2, o_h3, o_h4, o_h5, o_h6, o_h7)
        w_b = of_hop(i, w_b0, w_b1, w_b2, w_b3, w_b4, w_b5, w_b6, w_b7)
        w_t = of_hop(i, w_t0, w_t1, w_t2, w_t3, w_t4, w_t5, w_t6, w_t7)
        w_h = of_hop(i, w_h0, w_h1, w_h2, w_h3, w_h4, w_h5, w_h6, w_h7)
        hop_out = of_hop(i, out0, out1, out2, out3, out4, out5, out6, out7)
        hop_lse = of_hop(i, lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7)
        own = rows_of_hop(place, first, count, rows, valid)
        values = values_of(hop_out + batch * o_b + head * o_h, own, o_t, DV, BLOCK_DV)
        if HAS_LSE:
            hop_lse += batch * w_b + head * w_h
            total, total_lse = merged(total, total_lse, values, hop_lse, own, w_t)
        else:
            total += values
    if HAS_LSE:
        tl.debug_barrier()  # several warps read the old lse of a row, and one of them replaces it
        lse += batch * l_b + head * l_h
        tl.store(lse + rows * l_t, total_lse.to(lse.dtype.element_ty), mask=valid)
    if HAS_SINKS:
        rounded = total_lse.to(tl.float32)
        rounded = tl.where(rounded == float("-inf"), _LEAST_SINGLE, rounded)
        sink = tl.load(sinks + head).to(tl.float32)
        ratio = tl.exp(-tl.abs(rounded - sink))
        total *= (tl.where(rounded < sink, ratio, 1.0) / (1.0 + ratio))[:, None]
    out += batch * z_b + head * z_h
    at_out = out + rows[:, None] * z_t + dv[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


class HopResult(NamedTuple):
    """The result of one attention call for some rows, and the indices of these rows.

    Attributes:
        out: (B, N, H, Dv) in bf16, fp16 or fp32.
        lse: (B, N, H) in fp32 or fp64, or None for results that are added without weights.
        rows: the first of N adjacent rows, or an int32 tensor (T,). The tensor has, for each of T
            rows, the index of the row in `out`, or −1 if the row is not in `out`.
    """

    out: Tensor
    lse: Tensor | None
    rows: int | Tensor

    @property
    def first(self) -> int:
        """The first row, or −1 if `rows` is a table."""
        return -1 if isinstance(self.rows, Tensor) else self.rows


class _Merge(NamedTuple):
    """A prepared call of `merge_hops`, without its tensors."""

    launch: Prepared
    # (0,) int32, passed instead of each tensor that is not used. It has no memory, so a call that a
    # CUDA graph captures keeps none of the graph's memory.
    place: Tensor
    copies: bool  # whether some rows of hops are not contiguous


def merge_hops(
    hops: Sequence[HopResult],
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None = None,
    partial_lse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write the merged results of 1 to `MOST_HOPS` hops, in their order, to out and lse. A hop is
    the attention of some of the query rows over one of several blocks of keys.

    out is (B, T, H, Dv) in bf16, fp16 or fp32, and lse is (B, T, H) in fp32 or fp64. Their rows are
    contiguous. If partial_out (B, T, H, Dv) fp32 and partial_lse (B, T, H) fp64 are given, the
    merge continues this partial result. They may be the tensors `out` and `lse`. The `sinks` (H,)
    are added to the denominator of out, and are not part of lse. A row that no hop has gets the
    partial result. Without a partial result, it gets out 0 and lse −∞.

    If lse is None, partial_lse, the sinks and the lse of all hops must also be None, and the
    results are added without weights. In this case, a row that no hop has gets the partial result
    or, without a partial result, 0.
    """
    check_list("hops", hops, HopResult)
    outs, lses, rows = [x.out for x in hops], [x.lse for x in hops], [x.rows for x in hops]
    tables = [x if isinstance(x, Tensor) else None for x in rows]
    firsts = tuple([-1 if isinstance(x, Tensor) else x for x in rows])
    tensors = out, lse, partial_out, partial_lse, sinks, *outs, *lses, *tables
    key = "merge hops", firsts, partial_out is out and partial_lse is lse
    prepare = lambda *_: _prepare_merge(hops, out, lse, partial_out, partial_lse, sinks)  # noqa: E731
    call: _Merge | None = kept_call(key, tensors, prepare)
    if call is None:
        return
    place, missing = call.place, MOST_HOPS - len(hops)
    if call.copies:
        outs = [_ready(x) for x in outs]
    # The first hop fills the arguments of missing hops; the kernel never reads them.
    outs += outs[:1] * missing
    lses += lses[:1] * missing
    tables += tables[:1] * missing
    optional = *lses, *tables, partial_lse, lse, None if sinks is None else sinks.contiguous()
    *of_hops, partial_lse, lse, sinks = [place if x is None else x for x in optional]
    before = out if partial_out is None else partial_out
    run(call.launch, *outs, *of_hops, before, partial_lse, out, lse, sinks)


def _ready(out: Tensor) -> Tensor:
    return out if out.stride(3) == 1 else out.contiguous()


def _prepare_merge(
    hops: Sequence[HopResult],
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    sinks: Tensor | None,
) -> _Merge | None:
    _check(hops, out, lse, partial_out, partial_lse, sinks)
    if not out.numel():
        return None
    batch, rows, heads, value_dim = out.shape
    of_lse = lambda x: (0, 0, 0) if x is None else strides(x, 3)  # noqa: E731
    of_hops = [(x.first, x.out.shape[1], *strides(_ready(x.out), 3), *of_lse(x.lse)) for x in hops]
    of_hops += of_hops[:1] * (MOST_HOPS - len(hops))
    of_partial = (0, 0, 0) if partial_out is None else strides(partial_out, 3)
    arguments = (
        rows, heads, len(hops), *(x for of_each in zip(*of_hops, strict=True) for x in of_each),
        *of_partial, *of_lse(partial_lse), *strides(out, 3), *of_lse(lse),
    )  # fmt: skip
    in_place = partial_out is out and partial_lse is lse
    tile_rows = max(1, _MERGED_ELEMENTS // padded(value_dim))
    flags = {
        "DV": value_dim, "BLOCK_DV": padded(value_dim), "TILE_ROWS": tile_rows,
        "HAS_LSE": lse is not None, "HAS_PARTIAL": partial_out is not None,
        "HAS_SINKS": sinks is not None, "ONLY_ROWS": in_place and len(hops) == 1, "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip
    grid = (triton.cdiv(rows, tile_rows) * batch * heads,)
    launch = Prepared(flash_merge_hops, grid, out.device, arguments, flags)
    copies = any(x.out.stride(3) != 1 for x in hops)
    return _Merge(launch, torch.empty(0, dtype=torch.int32, device=out.device), copies)


def _check(
    hops: Sequence[HopResult],
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    sinks: Tensor | None,
) -> None:
    shapes = Shapes()
    shapes.check("out", out, "B T H Dv", DTYPES)
    check_rows("out", out)
    if partial_out is not None:
        shapes.check("partial_out", partial_out, "B T H Dv", (torch.float32,))
        check_rows("partial_out", partial_out)
    if lse is not None:
        shapes.check("lse", lse, "B T H", ACCUMULATORS)
        if partial_out is not None:
            shapes.check("partial_lse", partial_lse, "B T H", (torch.float64,))
    if sinks is not None:
        shapes.check("sinks", sinks, "H")
    if (lse is None or partial_out is None) and partial_lse is not None:
        raise ValueError("partial_lse must be None without lse or partial_out")
    if lse is None and sinks is not None:
        raise ValueError("sinks must be None without lse")
    if not 1 <= len(hops) <= MOST_HOPS:
        raise ValueError(f"hops must be 1 to {MOST_HOPS} results, got {len(hops)}")
    for i, hop in enumerate(hops):
        shapes.check(f"hops[{i}].out", hop.out, f"B N{i} H Dv", DTYPES)
        if lse is not None:
            shapes.check(f"hops[{i}].lse", hop.lse, f"B N{i} H", ACCUMULATORS)
        elif hop.lse is not None:
            raise ValueError(f"hops[{i}].lse must be None without lse")
        for x, first in zip(hop[:2], hops[0][:2], strict=True):
            if x is not None and first is not None and x.dtype != first.dtype:
                raise ValueError(f"hops[{i}] must have the dtypes of hops[0], got {x.dtype}")
        if isinstance(hop.rows, Tensor):
            shapes.check(f"hops[{i}].rows", hop.rows, "T", (torch.int32,))
            continue
        check_int(f"hops[{i}].rows", hop.rows, 0)
        if hop.rows + hop.out.shape[1] > out.shape[1]:
            found = f"{hop.out.shape[1]} rows from {hop.rows} on"
            raise ValueError(f"hops[{i}].rows must be in {out.shape[1]} rows, got {found}")


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

    The total (B, T, H, D) is fp32. The part is bf16, fp16 or fp32. `index` is int64 (N,) without
    repeated rows.
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
_calls: dict[Hashable, Any] = {}  # prepared calls; no tables could keep them


def kept_call(
    kind: Hashable, tensors: Sequence[Tensor | None], prepare: Callable[..., Any], *arguments: Any
) -> Any:
    """Return `prepare(*tensors, *arguments)`; the result is reused for tensors of this
    signature."""
    key = kind, signature(*tensors)
    call = _calls.get(key)
    if call is None:
        call = prepare(*tensors, *arguments)
        if len(_calls) >= _MOST_KEPT:
            _calls.clear()  # other threads keep what they have read
        _calls[key] = call
    return call
