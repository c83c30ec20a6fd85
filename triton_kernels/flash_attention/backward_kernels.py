"""FlashAttention-2's backward over tables of tiles, in two passes, which make it deterministic.

Backward needs out and lse of each query over all of its keys. Dao, "FlashAttention-2" (2023),
section 3.1, algorithm 2. With p = exp(score − lse) and delta = out·dout − dlse, dscore = p ·
(dout·v − delta). `flash_delta` computes delta once per row. Without a gradient of lse, delta is the
paper's D = rowsum(dO ∘ O) (line 4). The first pass computes dk and dv: for each tile of keys, it
loops over the blocks of queries. The second pass computes dq: for each tile of queries, it loops
over the blocks of keys. On request the first pass also adds to dq, atomically, and there is no
second pass. Backward then needs five matrix products instead of seven, but the order of additions,
and therefore the last bits of dq, may vary. Because lse is that of all keys, each key contributes
independently of all other keys. A rank can therefore compute the gradients of some keys by these
kernels over the slices of these keys.

Sizes: B batch, T query rows, Tk key rows, H query heads, D head dim of q and k, DV (Dv) head dim of
v and out. A tile has pieces of BLOCK_D and REST_D dims, or BLOCK_DV and REST_DV (`tiles.py`).

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim. Operands: q, k, v; g is dout; l is lse and delta, which have the same strides; dq, dk,
dv; a is slopes, (1 or B, H), of stride 0 or H. In `flash_delta`, o is out, l is dlse and d is
delta.
"""

from __future__ import annotations

import triton
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
    add_dot,
    add_rows,
    bias_of,
    describe,
    dot_of_rows,
    load_block,
    load_described,
    load_pieces,
    load_rows,
    program,
    rows_of_program,
    scaled,
    slope,
    visible_pairs,
    zeros,
)


@kernel
def flash_backward_kv(
    q, k, v, dout, q_described, dout_described, lse, delta, dq, dk, dv, slopes,
    tiles, full, cut, row_positions, column_positions,
    tile_count, kv_heads, group, batch_heads, head_block, query_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, a_b,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_CUT: tl.constexpr, REDUCE_DQ: tl.constexpr,
    SOFTCAP: tl.constexpr, FLIP: tl.constexpr, ALIBI: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of one tile of keys of one KV head: the inner loop of algorithm 2.

    The loop runs for each of the `group` query heads that share the KV head. Rows are keys and
    columns are queries, so scores are transposed: (TILE_ROWS keys, BLOCK_COLUMNS queries). With
    REDUCE_DQ, each block of queries also adds its contribution to dq atomically. For shapes, see
    `backward_kv`.
    """
    tile, batch, head = program(tiles, tile_count, kv_heads, batch_heads, head_block)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    rows, columns = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_COLUMNS)
    in_tile = rows < row_stop - row
    kv_head = head.to(tl.int64)
    k_rows = k + batch * k_b + kv_head * k_h
    k_tile = load_rows(k_rows, row, row_stop, k_t, k_d, TILE_ROWS, D, BLOCK_D, REST_D)
    v_rows = v + batch * v_b + kv_head * v_h
    v_tile = load_rows(v_rows, row, row_stop, v_t, v_d, TILE_ROWS, DV, BLOCK_DV, REST_DV)
    dk_tile = zeros(TILE_ROWS, BLOCK_D, REST_D)
    dv_tile = zeros(TILE_ROWS, BLOCK_DV, REST_DV)
    if ALIBI:
        row_position = tl.load(row_positions + row + rows, mask=in_tile, other=0)
    if TMA == "device" and HAS_FULL:
        # The group's query heads are a dimension; a descriptor per head would spill registers.
        q_blocks = describe_group(
            q + batch * q_b + kv_head * group * q_h, query_rows, group, q_t, q_h,
            BLOCK_COLUMNS, D, BLOCK_D, REST_D,
        )  # fmt: skip
        dout_blocks = describe_group(
            dout + batch * g_b + kv_head * group * g_h, query_rows, group, g_t, g_h,
            BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV,
        )  # fmt: skip
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
                    q_block = load_member(q_blocks, column, member)
                    dout_block = load_member(dout_blocks, column, member)
                else:
                    q_block = load_block(
                        q_rows, column, q_t, q_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D
                    )
                    dout_block = load_block(
                        dout_rows, column, g_t, g_d, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV
                    )
                column64 = column.to(tl.int64)
                lse2 = tl.load(lse_rows + column64 * l_t + columns * l_t) * LOG2_E
                delta_block = tl.load(delta_rows + column64 * l_t + columns * l_t)
                dot = dot_of_rows(k_tile, q_block, PRECISION)
                dp = dot_of_rows(v_tile, dout_block, PRECISION)
                bias = 0.0
                if ALIBI:
                    at = tl.load(column_positions + column + columns)
                    bias = bias_of(head_slope, row_position, at)
                p, ds = slope(
                    dot, dp, lse2[None, :], delta_block[None, :], bias, scale, cap,
                    FLIP, SOFTCAP, ALIBI,
                )  # fmt: skip
                dv_tile = add_dot(dv_tile, p, dout_block, PRECISION)
                dk_tile = add_dot(dk_tile, ds, q_block, PRECISION)
                if REDUCE_DQ:  # after the tile's last key p may be infinite, and k_tile is 0
                    ds = tl.where(in_tile[:, None], ds, 0.0)
                    dq_block = zeros(BLOCK_COLUMNS, BLOCK_D, REST_D)
                    dq_block = add_dot(dq_block, ds.T, k_tile, PRECISION)
                    dq_block = scaled(dq_block, gradient_scale)
                    add_rows(dq_rows, dq_block, column, columns, None, dq_t, D)
        if HAS_CUT:
            start = tl.load(tile + CUT_START)
            for j in tl.range(0, tl.load(tile + CUT_STOP) - start):
                entry = cut + (start + j) * CUT_WIDTH
                column = tl.load(entry + COLUMN_START)
                column_stop = tl.load(entry + COLUMN_STOP)
                q_block = load_rows(
                    q_rows, column, column_stop, q_t, q_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D
                )
                dout_block = load_rows(
                    dout_rows, column, column_stop, g_t, g_d,
                    BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV,
                )  # fmt: skip
                column64, valid = column.to(tl.int64), columns < column_stop - column
                lse2 = (
                    tl.load(lse_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0)
                    * LOG2_E
                )
                delta_block = tl.load(
                    delta_rows + column64 * l_t + columns * l_t, mask=valid, other=0.0
                )
                dot = dot_of_rows(k_tile, q_block, PRECISION)
                dp = dot_of_rows(v_tile, dout_block, PRECISION)
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
                dv_tile = add_dot(dv_tile, p, dout_block, PRECISION)
                dk_tile = add_dot(dk_tile, ds, q_block, PRECISION)
                if REDUCE_DQ:
                    dq_block = zeros(BLOCK_COLUMNS, BLOCK_D, REST_D)
                    dq_block = add_dot(dq_block, ds.T, k_tile, PRECISION)
                    dq_block = scaled(dq_block, gradient_scale)
                    add_rows(dq_rows, dq_block, column, columns, valid, dq_t, D)
    dk_rows = dk + batch * dk_b + kv_head * dk_h
    add_rows(dk_rows, scaled(dk_tile, gradient_scale), row, rows, in_tile, dk_t, D)
    dv_rows = dv + batch * dv_b + kv_head * dv_h
    add_rows(dv_rows, dv_tile, row, rows, in_tile, dv_t, DV)


@triton.jit
def describe_group(
    x, rows, group, stride_t, stride_h,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
):  # fmt: skip
    """Return the descriptor of each piece of x (rows, group, D), whose dims are contiguous."""
    block = tl.make_tensor_descriptor(
        x, [rows, group, D], [stride_t, stride_h, 1], [BLOCK_T, 1, BLOCK_D]
    )
    if REST_D == 0:
        pieces = (block,)
    else:
        rest = tl.make_tensor_descriptor(
            x, [rows, group, D], [stride_t, stride_h, 1], [BLOCK_T, 1, REST_D]
        )
        pieces = block, rest  # type: ignore[assignment]
    return pieces


@triton.jit
def load_member(descriptors, first, member):
    """Return a tile: rows from `first` on of one member of the group of `describe_group`."""
    block = descriptors[0].load([first, member, 0])
    block = block.reshape(block.shape[0], block.shape[2])
    if len(descriptors) == 1:
        tile = (block,)
    else:
        rest = descriptors[1].load([first, member, block.shape[1]])
        tile = block, rest.reshape(rest.shape[0], rest.shape[2])
    return tile


@kernel
def flash_backward_q(
    q, k, v, dout, k_described, v_described, lse, delta, dq, slopes,
    tiles, full, cut, row_positions, column_positions,
    tile_count, heads, group, batch_heads, head_block, key_rows, scale, cap, gradient_scale,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h,
    dq_b, dq_t, dq_h, a_b,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
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
    q_tile = load_rows(q_rows, row, row_stop, q_t, q_d, TILE_ROWS, D, BLOCK_D, REST_D)
    dout_rows = dout + batch * g_b + q_head * g_h
    dout_tile = load_rows(dout_rows, row, row_stop, g_t, g_d, TILE_ROWS, DV, BLOCK_DV, REST_DV)
    row64 = row.to(tl.int64)
    lse_rows = lse + batch * l_b + q_head * l_h + row64 * l_t
    lse2 = tl.load(lse_rows + rows * l_t, mask=in_tile, other=0.0)[:, None] * LOG2_E
    delta_rows = delta + batch * l_b + q_head * l_h + row64 * l_t
    delta_tile = tl.load(delta_rows + rows * l_t, mask=in_tile, other=0.0)[:, None]
    dq_tile = zeros(TILE_ROWS, BLOCK_D, REST_D)
    if ALIBI:
        head_slope = tl.load(slopes + batch * a_b + q_head) * LOG2_E
        row_position = tl.load(row_positions + row + rows, mask=in_tile, other=0)
    if HAS_FULL:
        if TMA == "device":
            k_blocks = describe(k, key_rows, k_t, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
            v_blocks = describe(v, key_rows, v_t, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV)
        start = tl.load(tile + FULL_START)
        for j in tl.range(0, tl.load(tile + FULL_STOP) - start):
            column = tl.load(full + start + j)
            if TMA == "host":
                k_block = load_described(k_described, batch, column, kv_head, k_b, k_t, k_h)
                v_block = load_described(v_described, batch, column, kv_head, v_b, v_t, v_h)
            elif TMA == "device":
                k_block, v_block = load_pieces(k_blocks, column), load_pieces(v_blocks, column)
            else:
                k_block = load_block(k, column, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
                v_block = load_block(v, column, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV)
            dot = dot_of_rows(q_tile, k_block, PRECISION)
            dp = dot_of_rows(dout_tile, v_block, PRECISION)
            bias = 0.0
            if ALIBI:
                at = tl.load(column_positions + column + columns)
                bias = bias_of(head_slope, row_position, at)
            _, ds = slope(dot, dp, lse2, delta_tile, bias, scale, cap, FLIP, SOFTCAP, ALIBI)
            dq_tile = add_dot(dq_tile, ds, k_block, PRECISION)
    if HAS_CUT:
        start = tl.load(tile + CUT_START)
        for j in tl.range(0, tl.load(tile + CUT_STOP) - start):
            entry = cut + (start + j) * CUT_WIDTH
            column = tl.load(entry + COLUMN_START)
            column_stop = tl.load(entry + COLUMN_STOP)
            k_block = load_rows(k, column, column_stop, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
            v_block = load_rows(
                v, column, column_stop, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV
            )
            dot = dot_of_rows(q_tile, k_block, PRECISION)
            dp = dot_of_rows(dout_tile, v_block, PRECISION)
            bias = 0.0
            if ALIBI:
                valid = columns < column_stop - column
                at = tl.load(column_positions + column + columns, mask=valid, other=0)
                bias = bias_of(head_slope, row_position, at)
            _, ds = slope(dot, dp, lse2, delta_tile, bias, scale, cap, FLIP, SOFTCAP, ALIBI)
            visible = visible_pairs(entry, row, rows, columns, row_positions, column_positions)
            ds = tl.where(visible, ds, 0.0)
            dq_tile = add_dot(dq_tile, ds, k_block, PRECISION)
    dq_rows = dq + batch * dq_b + q_head * dq_h
    add_rows(dq_rows, scaled(dq_tile, gradient_scale), row, rows, in_tile, dq_t, D)


@kernel
def flash_delta(
    out, dout, dlse, delta, rows_total, heads,
    o_b, o_t, o_h, o_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h, d_b, d_t, d_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, TILE_ROWS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Write delta of TILE_ROWS of the `rows_total` rows of one head; for shapes see `delta`."""
    batch, head, row, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    out += batch * o_b + head * o_h
    dout += batch * g_b + head * g_h
    out_rows = load_rows(out, row, rows_total, o_t, o_d, TILE_ROWS, DV, BLOCK_DV, REST_DV)
    dout_rows = load_rows(dout, row, rows_total, g_t, g_d, TILE_ROWS, DV, BLOCK_DV, REST_DV)
    value = tl.sum(out_rows[0].to(tl.float32) * dout_rows[0].to(tl.float32), 1)
    if REST_DV != 0:
        value += tl.sum(out_rows[1].to(tl.float32) * dout_rows[1].to(tl.float32), 1)
    if HAS_DLSE:
        at = dlse + batch * l_b + head * l_h + rows * l_t
        value -= tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(delta + batch * d_b + head * d_h + rows * d_t, value, mask=valid)
