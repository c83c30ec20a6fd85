"""FlashAttention-2's backward over tile tables: deterministic in two passes.

It needs the whole row's (out, lse). Dao, "FlashAttention-2" (2023), section 3.1, algorithm 2. With
p = exp(score − lse) and delta = out·dout − dlse, dscore = p · (dout·v − delta). `flash_delta`
computes delta once per row; it is the paper's D = rowsum(dO ∘ O) (line 4) and also takes the
gradient of lse. One pass walks query blocks for each key tile (dk, dv), another walks key blocks
for each query tile (dq). On request the first pass also adds to dq, atomically. This takes five
matrix products instead of seven, but the order of additions, and so the last bits of dq, may vary.
Given the whole row's lse, keys contribute independently, so keys on other ranks need only these
kernels over their own slices.

Sizes: B batch, T query rows, Tk key rows, H query heads, D head dim of q and k, DV (Dv) head dim of
v and out.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim. Operands: q, k, v; g is dout; l is lse and delta, which have the same strides; dq, dk,
dv; a is slopes, (1 or B, H), of stride 0 or H. In `flash_delta`, o is out, l is dlse and d is
delta.
"""

from __future__ import annotations

import triton.language as tl

from ..specialisation import kernel
from .tables import (
    COLUMN_START,
    COLUMN_STOP,
    CUT_START,
    CUT_STOP,
    CUT_WIDTH,
    FULL_START,
    FULL_STOP,
    TILE_START,
    TILE_STOP,
)
from .tiles import (
    LOG2_E,
    add_rows,
    bias_of,
    load_block,
    load_described,
    load_rows,
    program,
    rows_of_program,
    slope,
    visible_pairs,
    within,
)


@kernel
def flash_backward_kv(
    q, k, v, dout, q_described, dout_described, lse, delta, dq, dk, dv, slopes,
    tiles, full, cut, row_positions, column_positions,
    tile_count, kv_heads, group, batch_heads, head_block, query_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, a_b,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_CUT: tl.constexpr, REDUCE_DQ: tl.constexpr,
    SOFTCAP: tl.constexpr, FLIP: tl.constexpr, ALIBI: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of one key tile of one KV head: algorithm 2's inner loop.

    The loop runs for each of the `group` query heads that share the KV head. Rows are keys and
    columns are queries, so scores are transposed: (TILE_ROWS keys, BLOCK_COLUMNS queries). With
    REDUCE_DQ each block also adds its part of dq, atomically. For shapes see `backward_kv`.
    """
    tile, batch, head = program(tiles, tile_count, kv_heads, batch_heads, head_block)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    rows, columns = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_COLUMNS)
    d = tl.arange(0, BLOCK_D)
    in_tile = rows < row_stop - row
    kv_head = head.to(tl.int64)
    k_rows = k + batch * k_b + kv_head * k_h
    k_tile = load_rows(k_rows, row, row_stop, k_t, k_d, TILE_ROWS, D, BLOCK_D)
    v_rows = v + batch * v_b + kv_head * v_h
    v_tile = load_rows(v_rows, row, row_stop, v_t, v_d, TILE_ROWS, DV, BLOCK_DV)
    dk_tile = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([TILE_ROWS, BLOCK_DV], tl.float32)
    if ALIBI:
        row_position = tl.load(row_positions + row + rows, mask=in_tile, other=0)
    if (
        TMA == "device" and HAS_FULL
    ):  # the group's query heads are a dimension; a descriptor per head would spill registers
        q_blocks = tl.make_tensor_descriptor(
            q + batch * q_b + kv_head * group * q_h,
            [query_rows, group, D],
            [q_t, q_h, 1],
            [BLOCK_COLUMNS, 1, BLOCK_D],
        )
        dout_blocks = tl.make_tensor_descriptor(
            dout + batch * g_b + kv_head * group * g_h,
            [query_rows, group, DV],
            [g_t, g_h, 1],
            [BLOCK_COLUMNS, 1, BLOCK_DV],
        )
    for member in range(group):
        q_head = kv_head * group + member
        q_rows, dout_rows = q + batch * q_b + q_head * q_h, dout + batch * g_b + q_head * g_h
        lse_rows = lse + batch * l_b + q_head * l_h
        delta_rows = delta + batch * l_b + q_head * l_h
        dq_rows = dq + batch * dq_b + q_head * dq_h
        if ALIBI:
            head_slope = tl.load(slopes + batch * a_b + q_head) * LOG2_E
        if HAS_FULL:
            start = tl.load(tile + FULL_START)
            for j in tl.range(0, tl.load(tile + FULL_STOP) - start):
                column = tl.load(full + start + j)
                if TMA == "host":
                    q_block = load_described(q_described, batch, column, q_head, q_b, q_t, q_h)
                    dout_block = load_described(
                        dout_described, batch, column, q_head, g_b, g_t, g_h
                    )
                elif TMA == "device":
                    q_block = q_blocks.load([column, member, 0]).reshape(BLOCK_COLUMNS, BLOCK_D)
                    dout_block = dout_blocks.load([column, member, 0]).reshape(
                        BLOCK_COLUMNS, BLOCK_DV
                    )
                else:
                    q_block = load_block(q_rows, column, q_t, q_d, BLOCK_COLUMNS, D, BLOCK_D)
                    dout_block = load_block(
                        dout_rows, column, g_t, g_d, BLOCK_COLUMNS, DV, BLOCK_DV
                    )
                column64 = column.to(tl.int64)
                lse2 = tl.load(lse_rows + column64 * l_t + columns * l_t) * LOG2_E
                delta_block = tl.load(delta_rows + column64 * l_t + columns * l_t)
                dot = tl.dot(k_tile, q_block.T, input_precision=PRECISION)
                dp = tl.dot(v_tile, dout_block.T, input_precision=PRECISION)
                bias = 0.0
                if ALIBI:
                    at = tl.load(column_positions + column + columns)
                    bias = bias_of(head_slope, row_position, at)
                p, ds = slope(
                    dot, dp, lse2[None, :], delta_block[None, :], bias, scale, cap,
                    FLIP, SOFTCAP, ALIBI,
                )  # fmt: skip
                p = p.to(dout_block.dtype)
                dv_tile = tl.dot(p, dout_block, dv_tile, input_precision=PRECISION)
                ds = ds.to(q_block.dtype)
                dk_tile = tl.dot(ds, q_block, dk_tile, input_precision=PRECISION)
                if REDUCE_DQ:  # after the tile's last key p may be infinite, and k_tile is 0
                    ds = tl.where(in_tile[:, None], ds, 0.0)
                    dq_block = tl.dot(ds.T, k_tile, input_precision=PRECISION) * gradient_scale
                    at = dq_rows + column64 * dq_t + columns[:, None] * dq_t + d[None, :]
                    tl.atomic_add(at, dq_block, mask=(d < D)[None, :], sem="relaxed")
        if HAS_CUT:
            start = tl.load(tile + CUT_START)
            for j in tl.range(0, tl.load(tile + CUT_STOP) - start):
                entry = cut + (start + j) * CUT_WIDTH
                column = tl.load(entry + COLUMN_START)
                column_stop = tl.load(entry + COLUMN_STOP)
                q_block = load_rows(
                    q_rows, column, column_stop, q_t, q_d, BLOCK_COLUMNS, D, BLOCK_D
                )
                dout_block = load_rows(
                    dout_rows, column, column_stop, g_t, g_d, BLOCK_COLUMNS, DV, BLOCK_DV
                )
                column64, valid = column.to(tl.int64), columns < column_stop - column
                lse2 = (
                    tl.load(lse_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0)
                    * LOG2_E
                )
                delta_block = tl.load(
                    delta_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0
                )
                dot = tl.dot(k_tile, q_block.T, input_precision=PRECISION)
                dp = tl.dot(v_tile, dout_block.T, input_precision=PRECISION)
                bias = 0.0
                if ALIBI:
                    at = tl.load(column_positions + column + columns, mask=valid, other=0)
                    bias = bias_of(head_slope, row_position, at)
                p, ds = slope(
                    dot, dp, lse2[None, :], delta_block[None, :], bias, scale, cap,
                    FLIP, SOFTCAP, ALIBI,
                )  # fmt: skip
                visible = visible_pairs(entry, row, rows, columns, row_positions, column_positions)
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
                p = p.to(dout_block.dtype)
                dv_tile = tl.dot(p, dout_block, dv_tile, input_precision=PRECISION)
                ds = ds.to(q_block.dtype)
                dk_tile = tl.dot(ds, q_block, dk_tile, input_precision=PRECISION)
                if REDUCE_DQ:
                    dq_block = tl.dot(ds.T, k_tile, input_precision=PRECISION) * gradient_scale
                    at = dq_rows + column64 * dq_t + columns[:, None] * dq_t + d[None, :]
                    tl.atomic_add(at, dq_block, mask=within(valid, d, D, BLOCK_D), sem="relaxed")
    dk_rows = dk + batch * dk_b + kv_head * dk_h
    add_rows(dk_rows, dk_tile * gradient_scale, row, rows, in_tile, dk_t, D, BLOCK_D)
    dv_rows = dv + batch * dv_b + kv_head * dv_h
    add_rows(dv_rows, dv_tile, row, rows, in_tile, dv_t, DV, BLOCK_DV)


@kernel
def flash_backward_q(
    q, k, v, dout, k_described, v_described, lse, delta, dq, slopes,
    tiles, full, cut, row_positions, column_positions,
    tile_count, heads, group, batch_heads, head_block, key_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h, a_b,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_CUT: tl.constexpr, SOFTCAP: tl.constexpr, FLIP: tl.constexpr,
    ALIBI: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq of one query tile of one head: algorithm 2's update of dQ, as its own pass.

    Rows are queries and columns are keys, as in `flash_forward`. For shapes see `backward_q`.
    """
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, head_block)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    rows, columns = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_COLUMNS)
    in_tile = rows < row_stop - row
    q_head, kv_head = head.to(tl.int64), (head // group).to(tl.int64)
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    q_rows = q + batch * q_b + q_head * q_h
    q_tile = load_rows(q_rows, row, row_stop, q_t, q_d, TILE_ROWS, D, BLOCK_D)
    dout_rows = dout + batch * g_b + q_head * g_h
    dout_tile = load_rows(dout_rows, row, row_stop, g_t, g_d, TILE_ROWS, DV, BLOCK_DV)
    row64 = row.to(tl.int64)
    lse_rows = lse + batch * l_b + q_head * l_h + row64 * l_t
    lse2 = tl.load(lse_rows + rows * l_t, mask=in_tile, other=0.0)[:, None] * LOG2_E
    delta_rows = delta + batch * l_b + q_head * l_h + row64 * l_t
    delta_tile = tl.load(delta_rows + rows * l_t, mask=in_tile, other=0.0)[:, None]
    dq_tile = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    if ALIBI:
        head_slope = tl.load(slopes + batch * a_b + q_head) * LOG2_E
        row_position = tl.load(row_positions + row + rows, mask=in_tile, other=0)
    if HAS_FULL:
        if TMA == "device":
            k_blocks = tl.make_tensor_descriptor(
                k, [key_rows, D], [k_t, 1], [BLOCK_COLUMNS, BLOCK_D]
            )
            v_blocks = tl.make_tensor_descriptor(
                v, [key_rows, DV], [v_t, 1], [BLOCK_COLUMNS, BLOCK_DV]
            )
        start = tl.load(tile + FULL_START)
        for j in tl.range(0, tl.load(tile + FULL_STOP) - start):
            column = tl.load(full + start + j)
            if TMA == "host":
                k_block = load_described(k_described, batch, column, kv_head, k_b, k_t, k_h)
                v_block = load_described(v_described, batch, column, kv_head, v_b, v_t, v_h)
            elif TMA == "device":
                k_block, v_block = k_blocks.load([column, 0]), v_blocks.load([column, 0])
            else:
                k_block = load_block(k, column, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D)
                v_block = load_block(v, column, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV)
            dot = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            dp = tl.dot(dout_tile, v_block.T, input_precision=PRECISION)
            bias = 0.0
            if ALIBI:
                at = tl.load(column_positions + column + columns)
                bias = bias_of(head_slope, row_position, at)
            _, ds = slope(dot, dp, lse2, delta_tile, bias, scale, cap, FLIP, SOFTCAP, ALIBI)
            dq_tile = tl.dot(ds.to(k_block.dtype), k_block, dq_tile, input_precision=PRECISION)
    if HAS_CUT:
        start = tl.load(tile + CUT_START)
        for j in tl.range(0, tl.load(tile + CUT_STOP) - start):
            entry = cut + (start + j) * CUT_WIDTH
            column = tl.load(entry + COLUMN_START)
            column_stop = tl.load(entry + COLUMN_STOP)
            k_block = load_rows(k, column, column_stop, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D)
            v_block = load_rows(v, column, column_stop, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV)
            dot = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            dp = tl.dot(dout_tile, v_block.T, input_precision=PRECISION)
            bias = 0.0
            if ALIBI:
                valid = columns < column_stop - column
                at = tl.load(column_positions + column + columns, mask=valid, other=0)
                bias = bias_of(head_slope, row_position, at)
            _, ds = slope(dot, dp, lse2, delta_tile, bias, scale, cap, FLIP, SOFTCAP, ALIBI)
            visible = visible_pairs(entry, row, rows, columns, row_positions, column_positions)
            ds = tl.where(visible, ds, 0.0)
            dq_tile = tl.dot(ds.to(k_block.dtype), k_block, dq_tile, input_precision=PRECISION)
    dq_rows = dq + batch * dq_b + q_head * dq_h
    add_rows(dq_rows, dq_tile * gradient_scale, row, rows, in_tile, dq_t, D, BLOCK_D)


@kernel
def flash_delta(
    out, dout, dlse, delta, rows_total, heads,
    o_b, o_t, o_h, o_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h, d_b, d_t, d_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Write delta of TILE_ROWS of the `rows_total` rows of one head; for shapes see `delta`."""
    batch, head, row, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    out += batch * o_b + head * o_h
    dout += batch * g_b + head * g_h
    out_rows = load_rows(out, row, rows_total, o_t, o_d, TILE_ROWS, DV, BLOCK_DV).to(tl.float32)
    dout_rows = load_rows(dout, row, rows_total, g_t, g_d, TILE_ROWS, DV, BLOCK_DV).to(tl.float32)
    value = tl.sum(out_rows * dout_rows, 1)
    if HAS_DLSE:
        at = dlse + batch * l_b + head * l_h + rows * l_t
        value -= tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(delta + batch * d_b + head * d_h + rows * d_t, value, mask=valid)
