"""FlashAttention-2's backward over tile tables, from the whole row's (out, lse): deterministic in two passes.

Dao, "FlashAttention-2" (2023), section 3.1, algorithm 2. With p = exp(score − lse) and delta = out·dout − dlse,
dscore = p · (dout·v − delta). One pass walks query blocks for each key tile (dk, dv), another key blocks for each query tile
(dq). On request the first pass also adds to dq, atomically: five matrix products instead of seven, and the order of the
additions, hence the last bits of dq, is not determined. Given the whole row's lse, each key contributes on its own, so that
keys on other ranks need no more than these kernels over their own slices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .tables import TILE_WIDTH, Launch
from .tiles import LOG2_E, load_block, load_rows, program, scores_of, seen, within


@triton.jit
def flash_delta(out, dout, dlse, delta, rows_total, heads, o_b, o_t, o_h, o_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h, d_b, d_t, d_h,
                DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, DLSE: tl.constexpr):  # fmt: skip
    """delta = out·dout − dlse, of some rows of one head."""
    row, batch, head = tl.program_id(0) * ROWS, (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    head = head.to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows64, there = rows.to(tl.int64), rows < rows_total
    a = load_rows(out + batch * o_b + head * o_h, row, rows_total, o_t, o_d, ROWS, DV, BLOCK_DV).to(tl.float32)
    b = load_rows(dout + batch * g_b + head * g_h, row, rows_total, g_t, g_d, ROWS, DV, BLOCK_DV).to(tl.float32)
    value = tl.sum(a * b, 1)
    if DLSE:
        value -= tl.load(dlse + batch * l_b + head * l_h + rows64 * l_t, mask=there, other=0.0).to(tl.float32)
    tl.store(delta + batch * d_b + head * d_h + rows64 * d_t, value, mask=there)


@triton.jit
def slope(dot, dp, lse2, delta, scale, cap, FLIP: tl.constexpr, SOFTCAP: tl.constexpr):
    """(p, dscore / scale) from q·k and dout·v; lse2 and delta are already broadcast along the keys."""
    if FLIP:
        dot = -dot
    s = scores_of(dot, scale, cap, SOFTCAP)
    p = tl.exp2(s - lse2)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds *= 1.0 - (s / cap) * (s / cap)
    return p, ds


@triton.jit
def add_rows(total, values, row, rows, there, stride_t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """total[row …] += values, where `there`."""
    d = tl.arange(0, BLOCK_D)
    at = total + row.to(tl.int64) * stride_t + rows[:, None] * stride_t + d[None, :]
    tl.atomic_add(at, values, mask=within(there, d, D, BLOCK_D), sem="relaxed")


@triton.jit
def flash_backward_kv(
    q, k, v, dout, lse, delta, dq, dk, dv, tiles, full, cut, row_positions, column_positions,
    tile_count, kv_heads, group, batch_heads, head_block, query_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, CUT: tl.constexpr, REDUCE_DQ: tl.constexpr, SOFTCAP: tl.constexpr, FLIP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one KV head, over the query heads that share it. Scores are transposed: (keys, queries)."""
    tile, batch, head = program(tiles, tile_count, kv_heads, batch_heads, head_block)
    row, row_stop = tl.load(tile), tl.load(tile + 1)
    rows, columns, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    there = rows < row_stop - row
    kv_head = head.to(tl.int64)
    k_tile = load_rows(k + batch * k_b + kv_head * k_h, row, row_stop, k_t, k_d, ROWS, D, BLOCK_D)
    v_tile = load_rows(v + batch * v_b + kv_head * v_h, row, row_stop, v_t, v_d, ROWS, DV, BLOCK_DV)
    dk_tile = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    if TMA and FULL:  # the query heads of the group are one dimension, so that one descriptor serves them all
        q_blocks = tl.make_tensor_descriptor(
            q + batch * q_b + kv_head * group * q_h, [query_rows, group, D], [q_t, q_h, 1], [COLUMNS, 1, BLOCK_D]
        )
        dout_blocks = tl.make_tensor_descriptor(
            dout + batch * g_b + kv_head * group * g_h, [query_rows, group, DV], [g_t, g_h, 1], [COLUMNS, 1, BLOCK_DV]
        )
    for member in range(group):
        q_head = kv_head * group + member
        q_rows, dout_rows = q + batch * q_b + q_head * q_h, dout + batch * g_b + q_head * g_h
        lse_rows, delta_rows = lse + batch * l_b + q_head * l_h, delta + batch * l_b + q_head * l_h
        dq_rows = dq + batch * dq_b + q_head * dq_h
        if FULL:
            start = tl.load(tile + 2)
            for j in tl.range(0, tl.load(tile + 3) - start):
                column = tl.load(full + start + j)
                if TMA:
                    q_block = q_blocks.load([column, member, 0]).reshape(COLUMNS, BLOCK_D)
                    dout_block = dout_blocks.load([column, member, 0]).reshape(COLUMNS, BLOCK_DV)
                else:
                    q_block = load_block(q_rows, column, q_t, q_d, COLUMNS, D, BLOCK_D)
                    dout_block = load_block(dout_rows, column, g_t, g_d, COLUMNS, DV, BLOCK_DV)
                column64 = column.to(tl.int64)
                lse2, delta_block = (
                    tl.load(lse_rows + column64 * l_t + columns * l_t) * LOG2_E,
                    tl.load(delta_rows + column64 * l_t + columns * l_t),
                )
                dot = tl.dot(k_tile, q_block.T, input_precision=PRECISION)
                dp = tl.dot(v_tile, dout_block.T, input_precision=PRECISION)
                p, ds = slope(dot, dp, lse2[None, :], delta_block[None, :], scale, cap, FLIP, SOFTCAP)
                dv_tile = tl.dot(p.to(dout_block.dtype), dout_block, dv_tile, input_precision=PRECISION)
                ds = ds.to(q_block.dtype)
                dk_tile = tl.dot(ds, q_block, dk_tile, input_precision=PRECISION)
                if REDUCE_DQ:
                    share = tl.dot(ds.T, k_tile, input_precision=PRECISION) * gradient_scale
                    at = dq_rows + column64 * dq_t + columns[:, None] * dq_t + d[None, :]
                    tl.atomic_add(at, share, mask=(d < D)[None, :], sem="relaxed")
        if CUT:
            start = tl.load(tile + 4)
            for j in tl.range(0, tl.load(tile + 5) - start):
                entry = cut + (start + j) * 6
                column, column_stop = tl.load(entry), tl.load(entry + 1)
                q_block = load_rows(q_rows, column, column_stop, q_t, q_d, COLUMNS, D, BLOCK_D)
                dout_block = load_rows(dout_rows, column, column_stop, g_t, g_d, COLUMNS, DV, BLOCK_DV)
                column64, valid = column.to(tl.int64), columns < column_stop - column
                lse2 = tl.load(lse_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0) * LOG2_E
                delta_block = tl.load(delta_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0)
                dot = tl.dot(k_tile, q_block.T, input_precision=PRECISION)
                dp = tl.dot(v_tile, dout_block.T, input_precision=PRECISION)
                p, ds = slope(dot, dp, lse2[None, :], delta_block[None, :], scale, cap, FLIP, SOFTCAP)
                visible = seen(entry, row, rows, columns, row_positions, column_positions)
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
                dv_tile = tl.dot(p.to(dout_block.dtype), dout_block, dv_tile, input_precision=PRECISION)
                ds = ds.to(q_block.dtype)
                dk_tile = tl.dot(ds, q_block, dk_tile, input_precision=PRECISION)
                if REDUCE_DQ:
                    share = tl.dot(ds.T, k_tile, input_precision=PRECISION) * gradient_scale
                    at = dq_rows + column64 * dq_t + columns[:, None] * dq_t + d[None, :]
                    tl.atomic_add(at, share, mask=within(valid, d, D, BLOCK_D), sem="relaxed")
    add_rows(dk + batch * dk_b + kv_head * dk_h, dk_tile * gradient_scale, row, rows, there, dk_t, D, BLOCK_D)
    add_rows(dv + batch * dv_b + kv_head * dv_h, dv_tile, row, rows, there, dv_t, DV, BLOCK_DV)


@triton.jit
def flash_backward_q(
    q, k, v, dout, lse, delta, dq, tiles, full, cut, row_positions, column_positions,
    tile_count, heads, group, batch_heads, head_block, key_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, CUT: tl.constexpr, SOFTCAP: tl.constexpr, FLIP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head."""
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, head_block)
    row, row_stop = tl.load(tile), tl.load(tile + 1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = rows < row_stop - row
    q_head, kv_head = head.to(tl.int64), (head // group).to(tl.int64)
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    q_tile = load_rows(q + batch * q_b + q_head * q_h, row, row_stop, q_t, q_d, ROWS, D, BLOCK_D)
    dout_tile = load_rows(dout + batch * g_b + q_head * g_h, row, row_stop, g_t, g_d, ROWS, DV, BLOCK_DV)
    row64 = row.to(tl.int64)
    lse2 = tl.load(lse + batch * l_b + q_head * l_h + row64 * l_t + rows * l_t, mask=there, other=0.0)[:, None] * LOG2_E
    delta_tile = tl.load(delta + batch * l_b + q_head * l_h + row64 * l_t + rows * l_t, mask=there, other=0.0)[:, None]
    dq_tile = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if FULL:
        if TMA:
            k_blocks = tl.make_tensor_descriptor(k, [key_rows, D], [k_t, 1], [COLUMNS, BLOCK_D])
            v_blocks = tl.make_tensor_descriptor(v, [key_rows, DV], [v_t, 1], [COLUMNS, BLOCK_DV])
        start = tl.load(tile + 2)
        for j in tl.range(0, tl.load(tile + 3) - start):
            column = tl.load(full + start + j)
            if TMA:
                k_block, v_block = k_blocks.load([column, 0]), v_blocks.load([column, 0])
            else:
                k_block = load_block(k, column, k_t, k_d, COLUMNS, D, BLOCK_D)
                v_block = load_block(v, column, v_t, v_d, COLUMNS, DV, BLOCK_DV)
            dot = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            dp = tl.dot(dout_tile, v_block.T, input_precision=PRECISION)
            _, ds = slope(dot, dp, lse2, delta_tile, scale, cap, FLIP, SOFTCAP)
            dq_tile = tl.dot(ds.to(k_block.dtype), k_block, dq_tile, input_precision=PRECISION)
    if CUT:
        start = tl.load(tile + 4)
        for j in tl.range(0, tl.load(tile + 5) - start):
            entry = cut + (start + j) * 6
            column, column_stop = tl.load(entry), tl.load(entry + 1)
            k_block = load_rows(k, column, column_stop, k_t, k_d, COLUMNS, D, BLOCK_D)
            v_block = load_rows(v, column, column_stop, v_t, v_d, COLUMNS, DV, BLOCK_DV)
            dot = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            dp = tl.dot(dout_tile, v_block.T, input_precision=PRECISION)
            _, ds = slope(dot, dp, lse2, delta_tile, scale, cap, FLIP, SOFTCAP)
            ds = tl.where(seen(entry, row, rows, columns, row_positions, column_positions), ds, 0.0)
            dq_tile = tl.dot(ds.to(k_block.dtype), k_block, dq_tile, input_precision=PRECISION)
    add_rows(dq + batch * dq_b + q_head * dq_h, dq_tile * gradient_scale, row, rows, there, dq_t, D, BLOCK_D)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """(B, T, H) fp32: out·dout − dlse, of out and dout (B, T, H, Dv) and perhaps the gradient of lse (B, T, H)."""
    block = configs.Config(64, 0, 4, 1)
    (out, dout), _ = configs.prepare(block, out, dout)
    batch, rows, heads, value_dim = out.shape
    result = torch.empty((batch, rows, heads), dtype=torch.float32, device=out.device)
    if result.numel():
        gradient = result if dlse is None else dlse
        strides = [*out.stride(), *dout.stride(), *gradient.stride(), *result.stride()]
        grid = triton.cdiv(rows, block.rows), batch * heads
        flags = {"DV": value_dim, "BLOCK_DV": configs.padded(value_dim), "ROWS": block.rows, "DLSE": dlse is not None}
        configs.run(flash_delta, grid, out.device, [out, dout, gradient, result, rows, heads, *strides], flags, 4, 1)
    return result


def backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    launches: list[Launch],
    config: configs.Config,
    *,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    softcap: float = 0.0,
    dq: Tensor | None = None,
) -> None:
    """Add to dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv), fp32, what flows through a transposed table; to dq too if given.

    lse (B, T, H) fp32 and `delta` are the whole row's; lse must be finite, any value serving a row that sees nothing.
    """
    gradients = [dk if dq is None else dq, dk, dv]
    flags = {"REDUCE_DQ": dq is not None}
    _backward(flash_backward_kv, (q, k, v, dout), lse, delta, launches, config, gradients, scale, softcap, flags)


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    launches: list[Launch],
    config: configs.Config,
    *,
    dq: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Add to dq (B, T, H, D) fp32 what flows through a table; the other arguments are those of `backward_kv`."""
    _backward(flash_backward_q, (q, k, v, dout), lse, delta, launches, config, [dq], scale, softcap, {})


def _backward(
    kernel: Any,
    operands: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    launches: list[Launch],
    config: configs.Config,
    gradients: list[Tensor],
    scale: float,
    softcap: float,
    flags: dict[str, Any],
) -> None:
    (q, k, v, dout), tma = configs.prepare(config, *operands)
    lse, delta = lse.contiguous(), delta.contiguous()
    batch, _, _, dim = q.shape
    group = q.shape[2] // k.shape[2]
    if kernel is flash_backward_kv:
        walked, heads, sharing = (q, dout), k.shape[2], 1
    else:
        walked, heads, sharing = (k, v), q.shape[2], group
    strides = [s for x in (q, k, v, dout) for s in x.stride()]
    strides += [s for x in (lse, *gradients) for s in x.stride()[:3]]
    flags = flags | configs.constants(config, dim, v.shape[-1], q.dtype, tma) | {"SOFTCAP": softcap != 0, "FLIP": scale < 0}
    for launch in launches:
        tile_count = launch.tiles.numel() // TILE_WIDTH
        together = configs.head_block(*walked, sharing, batch * heads)
        arguments = [
            q, k, v, dout, lse, delta, *gradients, *launch.arrays,
            tile_count, heads, group, batch * heads, together, walked[0].shape[1],
            *configs.scoring(scale, softcap), scale, *strides,
        ]  # fmt: skip
        parts = {"FULL": launch.has_full, "CUT": launch.has_cut}
        grid = (tile_count * batch * heads,)
        configs.run(kernel, grid, q.device, arguments, flags | parts, *config.resources(launch.has_cut))
