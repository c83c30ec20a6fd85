"""The forward kernels of FlashAttention-2, over tables of tiles and blocks (`tables.py`).

The method is from Dao, "FlashAttention-2" (2023), section 3.1, algorithm 1, with two changes.
First, a table lists the blocks of keys for each tile of queries. A block is *full* if all queries
of the tile attend to all of its keys, and *cut* in all other cases. A loop without masks and
branches computes the full blocks, and a second loop computes the cut blocks. Second, a launch may
continue a partial result (out, lse) over other keys.

Partial results over disjoint keys are merged like the blocks of the paper: each has a maximum, here
its lse, and an accumulator. Between launches, out is stored in fp32, and the natural lse is stored
in fp64 (docs/decisions/softmax.md has the reason). If a launch has few tiles, several programs
share the columns of each tile, as in Flash-Decoding (Dao et al. 2023), and a second launch merges
their partial results.

Sizes: B batch, T query rows, Tk key rows, H query heads, D head dim of q and k, DV (Dv) head dim of
v and out, P parts of a tile. A tile has pieces of BLOCK_D and REST_D dims, or BLOCK_DV and REST_DV
(`tiles.py`).

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim, and s the parts of a tile whose columns are split; rows of DV elements of results are
contiguous. Operands: q, k, v; o is out, l is lse, p is partial_out, and r is partial_lse; a is
slopes, (1 or B, H), of stride 0 or H. In `flash_merge`, s is split_out and u is split_lse, with one
partial result per part.
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
    FLAGS,
    FULL_START,
    FULL_STOP,
    LAST,
    PART,
    TILE_START,
    TILE_STOP,
)
from .tiles import (
    LN_2,
    LOG2_E,
    add_dot,
    added,
    bias_of,
    describe,
    divided,
    dot_of_rows,
    load_block,
    load_described,
    load_pieces,
    load_rows,
    load_tile,
    program,
    scaled,
    scores_of,
    store_rows,
    visible_pairs,
    zeros,
)

# In fp32 this has the effect of no sink, with any lse. A sink of −∞ is replaced by it, since −∞
# minus the lse of a row without keys, which is −∞ too, would be NaN.
_LEAST_SINK = tl.constexpr(-1e30)


@kernel
def flash_forward(
    q, k, v, k_described, v_described, out, lse, partial_out, partial_lse, sinks, slopes,
    tiles, full, cut, row_positions, column_positions,
    tile_count, heads, group, batch_heads, head_block, key_rows, scale, cap,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h,
    l_b, l_t, l_h, p_s, p_b, p_t, p_h, r_s, r_b, r_t, r_h, a_b,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_CUT: tl.constexpr, HAS_PARTIAL: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, FLIP: tl.constexpr, ALIBI: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one head: the inner loop of algorithm 1 over blocks of keys.

    For shapes, see `forward`, which launches one program per (tile, batch, head). `group` query
    heads share a KV head. As in the paper, m (TILE_ROWS,) is the running maximum, here in units of
    log2. z is the running sum, which the paper calls ℓ. acc (TILE_ROWS, DV) is the output before it
    is divided by z. `FLIP` says that the scale is negative: q·k is negated, and `scale` is the
    absolute value of the scale. With `ALIBI`, the head's slope times the distance of the positions
    is subtracted from scores.
    """
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, head_block)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    flags = tl.load(tile + FLAGS)
    rows, columns = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_COLUMNS)
    in_tile = rows < row_stop - row
    kv_head = head // group
    q += batch * q_b + head.to(tl.int64) * q_h
    k += batch * k_b + kv_head.to(tl.int64) * k_h
    v += batch * v_b + kv_head.to(tl.int64) * v_h
    if TMA != "" and HAS_FULL:  # its rows end with the tile, so each program makes its own
        q_tile = load_pieces(describe(q, row_stop, q_t, TILE_ROWS, D, BLOCK_D, REST_D), row)
    else:
        q_tile = load_rows(q, row, row_stop, q_t, q_d, TILE_ROWS, D, BLOCK_D, REST_D)
    if TMA == "device" and HAS_FULL:
        k_blocks = describe(k, key_rows, k_t, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
        v_blocks = describe(v, key_rows, v_t, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV)

    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    z = tl.zeros([TILE_ROWS], tl.float32)
    acc = zeros(TILE_ROWS, BLOCK_DV, REST_DV)
    row64 = row.to(tl.int64)
    if ALIBI:
        slope = tl.load(slopes + batch * a_b + head) * LOG2_E
        row_position = tl.load(row_positions + row + rows, mask=in_tile, other=0)
    if HAS_FULL:
        start = tl.load(tile + FULL_START)
        for j in tl.range(0, tl.load(tile + FULL_STOP) - start):
            column = tl.load(full + start + j)
            if TMA == "host":
                k_block = load_described(k_described, batch, column, kv_head, k_b, k_t, k_h)
            elif TMA == "device":
                k_block = load_pieces(k_blocks, column)
            else:
                k_block = load_block(k, column, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
            s = dot_of_rows(q_tile, k_block, PRECISION)
            if FLIP:
                s = -s
            if SOFTCAP or ALIBI:
                s = scores_of(s, scale, cap, SOFTCAP)
                if ALIBI:
                    s -= bias_of(slope, row_position, tl.load(column_positions + column + columns))
                m_new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - m_new[:, None])
            else:
                m_new = tl.maximum(m, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            z = z * alpha + tl.sum(p, 1)
            acc = scaled(acc, alpha[:, None])
            if TMA == "host":
                v_block = load_described(v_described, batch, column, kv_head, v_b, v_t, v_h)
            elif TMA == "device":
                v_block = load_pieces(v_blocks, column)
            else:
                v_block = load_block(v, column, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV)
            acc = add_dot(acc, p, v_block, PRECISION)
            m = m_new

    if HAS_CUT:
        start = tl.load(tile + CUT_START)
        for j in tl.range(0, tl.load(tile + CUT_STOP) - start):
            entry = cut + (start + j) * CUT_WIDTH
            column = tl.load(entry + COLUMN_START)
            column_stop = tl.load(entry + COLUMN_STOP)
            k_block = load_rows(k, column, column_stop, k_t, k_d, BLOCK_COLUMNS, D, BLOCK_D, REST_D)
            s = dot_of_rows(q_tile, k_block, PRECISION)
            if FLIP:
                s = -s
            s = scores_of(s, scale, cap, SOFTCAP)
            if ALIBI:
                valid = columns < column_stop - column
                at = tl.load(column_positions + column + columns, mask=valid, other=0)
                s -= bias_of(slope, row_position, at)
            visible = visible_pairs(entry, row, rows, columns, row_positions, column_positions)
            s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - finite[:, None])
            alpha = tl.exp2(m - finite)
            z = z * alpha + tl.sum(p, 1)
            v_block = load_rows(
                v, column, column_stop, v_t, v_d, BLOCK_COLUMNS, DV, BLOCK_DV, REST_DV
            )
            acc = add_dot(scaled(acc, alpha[:, None]), p, v_block, PRECISION)
            m = m_new

    # The partial result is joined at the end. Loaded first, it decided the accumulator's layout,
    # and the fp32 kernels spilled 19 KB per thread.
    if HAS_PARTIAL:
        part = tl.load(tile + PART).to(tl.int64)
        partial_out += part * p_s + batch * p_b + head.to(tl.int64) * p_h + row64 * p_t
        partial_lse += part * r_s + batch * r_b + head.to(tl.int64) * r_h + row64 * r_t
        continued = in_tile & (flags % LAST == 0)  # not FIRST
        m, z, acc = join(
            m, z, acc, partial_out, partial_lse, rows, continued, p_t, r_t, DV, BLOCK_DV, REST_DV
        )
    out += batch * o_b + head.to(tl.int64) * o_h + row64 * o_t
    lse += batch * l_b + head.to(tl.int64) * l_h + row64 * l_t
    finish(
        m, z, acc, out, lse, partial_out, partial_lse, sinks + head, rows, in_tile, flags,
        o_t, l_t, p_t, r_t, DV, HAS_PARTIAL, HAS_SINKS,
    )  # fmt: skip


@kernel
def flash_merge(
    split_out, split_lse, out, lse, partial_out, partial_lse, sinks, tiles,
    tile_count, heads, batch_heads, parts,
    s_s, s_b, s_t, s_h, u_s, u_b, u_t, u_h, o_b, o_t, o_h, l_b, l_t, l_h,
    p_b, p_t, p_h, r_b, r_t, r_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, ROWS: tl.constexpr,
    HAS_PARTIAL: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ROWS rows of one tile of queries of one head.

    Several programs have computed the tile, each over some of the keys. Their results are the
    parts, which are merged in the order of the keys. The second index of a program counts the rows
    of a tile. split_out is (P, B, T, H, Dv) and split_lse is (P, B, T, H). For all further tensors,
    see `_prepare_merge`.
    """
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, batch_heads)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    flags = tl.load(tile + FLAGS)
    row += tl.program_id(1) * ROWS
    rows = tl.arange(0, ROWS)
    row64, head64 = row.to(tl.int64), head.to(tl.int64)
    in_tile = rows < row_stop - row
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, BLOCK_DV, REST_DV)
    partial_out += batch * p_b + head64 * p_h + row64 * p_t
    partial_lse += batch * r_b + head64 * r_h + row64 * r_t
    if HAS_PARTIAL:
        continued = in_tile & (flags % LAST == 0)  # not FIRST
        m, z, acc = join(
            m, z, acc, partial_out, partial_lse, rows, continued, p_t, r_t, DV, BLOCK_DV, REST_DV
        )
        tl.debug_barrier()  # several warps read the partial lse of a row, and one replaces it
    split_out += batch * s_b + head64 * s_h + row64 * s_t
    split_lse += batch * u_b + head64 * u_h + row64 * u_t
    for part in range(parts):
        part64 = tl.full([], part, tl.int64)
        part_out, part_lse = split_out + part64 * s_s, split_lse + part64 * u_s
        m, z, acc = join(
            m, z, acc, part_out, part_lse, rows, in_tile, s_t, u_t, DV, BLOCK_DV, REST_DV
        )
    out += batch * o_b + head64 * o_h + row64 * o_t
    lse += batch * l_b + head64 * l_h + row64 * l_t
    finish(
        m, z, acc, out, lse, partial_out, partial_lse, sinks + head, rows, in_tile, flags,
        o_t, l_t, p_t, r_t, DV, HAS_PARTIAL, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def join(
    m, z, acc, partial_out, partial_lse, rows, continued, p_t, r_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
):  # fmt: skip
    """Return (m, z, acc) of a tile, merged with a partial result.

    m is the running maximum and z is the running sum, both (TILE_ROWS,). acc is the accumulator
    (TILE_ROWS, DV), as in `flash_forward`. `partial_out` and `partial_lse` are addresses of the
    tile's first row in one head. Only rows in the mask `continued` have a partial result. All other
    rows do not change.
    """
    partial_lse2 = tl.load(partial_lse + rows * r_t, mask=continued, other=float("-inf")) * LOG2_E
    m_new = tl.maximum(m, partial_lse2.to(tl.float32))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m - finite), tl.exp2((partial_lse2 - finite).to(tl.float32))
    # Masked: a branch around this code spilled 208 bytes in the fp32 kernels' loops.
    at = partial_out + rows[:, None] * p_t
    partial = load_tile(at, continued, 1, DV, BLOCK_DV, REST_DV)
    acc = added(scaled(acc, alpha[:, None]), scaled(partial, beta[:, None]))
    return m_new, z * alpha + beta, acc


@triton.jit
def finish(
    m, z, acc, out, lse, partial_out, partial_lse, sink, rows, in_tile, flags,
    o_t, l_t, p_t, r_t, DV: tl.constexpr,
    HAS_PARTIAL: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide acc by z and store it, the last step of algorithm 1.

    A finished tile is written to out and lse. A tile that needs further keys is written to the
    partial result. Addresses point to the tile's first row in one head. A row without keys has out
    0 and lse −inf. A sink is a logit that is added to the denominator of out, but not to lse: out
    is multiplied by the fraction of the denominator that comes from keys.
    """
    blind = z == 0.0
    total = tl.where(blind, 1.0, z)
    acc = divided(acc, total[:, None])
    lse2 = tl.where(blind, float("-inf"), m.to(tl.float64) + tl.log2(total).to(tl.float64))
    if HAS_PARTIAL:
        unfinished = in_tile & (flags // LAST == 0)
        store_rows(partial_out, acc, rows, p_t, unfinished, DV)
        tl.store(partial_lse + rows * r_t, lse2 * LN_2, mask=unfinished)
    finished = in_tile & (flags // LAST == 1)
    tl.store(lse + rows * l_t, (lse2 * LN_2).to(tl.float32), mask=finished)
    if HAS_SINKS:
        logit = tl.load(sink).to(tl.float32)
        logit = tl.maximum(logit, _LEAST_SINK, propagate_nan=tl.PropagateNan.ALL)
        keys_fraction = 1.0 / (1.0 + tl.exp2(logit * LOG2_E - lse2.to(tl.float32)))
        acc = scaled(acc, keys_fraction[:, None])
    store_rows(out, acc, rows, o_t, finished, DV)
