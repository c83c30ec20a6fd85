"""What the kernels share: loading tiles, scores, who sees whom, and which (tile, head) a program computes."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def within(there, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) bool: rows that are there, and columns before D."""
    mask = there[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def load_rows(x, first, stop, stride_t, stride_d, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(ROWS, BLOCK_D) rows first … of x, with zeros in rows from `stop` on and in columns from D on."""
    rows, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    x += first.to(tl.int64) * stride_t
    mask = within(rows < stop - first, d, D, BLOCK_D)
    return tl.load(x + rows[:, None] * stride_t + d[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def load_block(x, first, stride_t, stride_d, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The same where all rows are known to be there."""
    rows, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    x += first.to(tl.int64) * stride_t
    at = x + rows[:, None] * stride_t + d[None, :] * stride_d
    if D != BLOCK_D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def scores_of(dot, scale, cap, SOFTCAP: tl.constexpr):
    """Scores in units of log2, from q·k: scale · q·k, or cap · tanh(scale · q·k)."""
    s = dot * scale
    if SOFTCAP:
        s = cap * tanh(s)
    return s


@triton.jit
def tanh(x):
    """To fp32 rounding: near 0, where 1 − e^{−2|x|} cancels, by its series up to x¹¹."""
    square = x * x
    series = 1.0 + square * (
        -0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * (0.0218694885 - square * 0.0088632355)))
    )
    e = tl.exp2(-2.885390081777927 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.09, x * series, tl.where(x < 0, -far, far))


@triton.jit
def seen(entry, row_first, rows, columns, row_positions, column_positions):
    """(R, C) bool: which columns of a cut entry (six integers, `tables.py`) each row of a tile sees."""
    column, column_stop = tl.load(entry), tl.load(entry + 1)
    low, high = tl.load(entry + 2), tl.load(entry + 3)
    row_start, row_stop = tl.load(entry + 4), tl.load(entry + 5)
    row, col = row_first + rows, column + columns
    in_rows, in_columns = (row >= row_start) & (row < row_stop), col < column_stop
    row_position = tl.load(row_positions + row, mask=in_rows, other=0)
    column_position = tl.load(column_positions + col, mask=in_columns, other=0)
    distance = column_position[None, :] - row_position[:, None]
    return (distance >= low) & (distance <= high) & in_rows[:, None] & in_columns[None, :]


@triton.jit
def program(tiles, tile_count, heads, batch_heads, head_block):
    """(address of the tile's entry, batch, head) of this program: tiles in order, for `head_block` heads at a time.

    Programs that run together then read the keys and values of few heads, which stay in the second-level cache.
    """
    pid = tl.program_id(0)
    per_block = tile_count * head_block
    block = pid // per_block
    in_block = tl.minimum(head_block, batch_heads - block * head_block)
    within = pid - block * per_block
    batch_head = block * head_block + within % in_block
    return tiles + (within // in_block) * 8, (batch_head // heads).to(tl.int64), batch_head % heads
