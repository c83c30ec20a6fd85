"""Functions of all kernels: loading tiles, scores, masks, and the (tile, head) of a program.

T is the number of rows of an operand and D its head dim. Kernels load BLOCK_T rows at a time.
A block of Triton has a power of two of dims, so a tile of an operand is a tuple of one or two
pieces (`configs.pieces`): the first BLOCK_D dims, and the next REST_D, such as 128 and 64 of 192.
REST_D is 0 if there is one piece. `stride_t` and `stride_d` are an operand's strides along rows and
head dim, in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import (
    BAND_HIGH,
    BAND_LOW,
    COLUMN_START,
    COLUMN_STOP,
    ROW_START,
    ROW_STOP,
    TILE_WIDTH,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    x, first, stop, stride_t, stride_d,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
):  # fmt: skip
    """Return a tile (BLOCK_T, D): rows of x (·, D) from `first` on. Rows from `stop` on are 0."""
    rows = tl.arange(0, BLOCK_T)
    at = x + first.to(tl.int64) * stride_t + rows[:, None] * stride_t
    return load_tile(at, rows < stop - first, stride_d, D, BLOCK_D, REST_D)


@triton.jit
def load_block(
    x, first, stride_t, stride_d,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
):  # fmt: skip
    """Load rows like `load_rows`, from an x that has all BLOCK_T rows."""
    rows = tl.arange(0, BLOCK_T)
    at = x + first.to(tl.int64) * stride_t + rows[:, None] * stride_t
    return load_tile(at, None, stride_d, D, BLOCK_D, REST_D)


@triton.jit
def load_tile(at, row_mask, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr):
    """Return a tile of the rows at addresses `at` (rows, 1), under a mask (rows,) or None."""
    block = load_piece(at, row_mask, stride_d, D, 0, BLOCK_D)
    return (
        (block,) if REST_D == 0 else (block, load_piece(at, row_mask, stride_d, D, BLOCK_D, REST_D))
    )


@triton.jit
def load_piece(
    at, row_mask, stride_d, D: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return a piece of `load_tile`: BLOCK_D dims from FIRST_D on. Dims from D on are 0."""
    d = FIRST_D + tl.arange(0, BLOCK_D)
    at += d[None, :] * stride_d
    mask = within(row_mask, d, D, FIRST_D + BLOCK_D)
    return tl.load(at) if mask is None else tl.load(at, mask=mask, other=0.0)


@triton.jit
def within(row_mask, d, D: tl.constexpr, STOP_D: tl.constexpr):
    """Return (rows, dims) bool: the rows of a mask (rows,) or None, in dims d < STOP_D below D.

    None stands for all rows and dims.
    """
    mask = None if row_mask is None else row_mask[:, None]
    if D < STOP_D:
        below = (d < D)[None, :]
        mask = below if mask is None else mask & below
    return mask


@triton.jit
def load_described(x, batch, first, head, stride_b, stride_t, stride_h):
    """Return a tile of one piece: rows of one head from `first` on, by a descriptor of all rows.

    The descriptor is of x (B, T, H, D) as (B · T, H · D).
    """
    row = (batch * (stride_b // stride_t)).to(tl.int32) + first
    return (x.load([row, (head * stride_h).to(tl.int32)]),)


@triton.jit
def describe(
    x, rows, stride_t,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr,
):  # fmt: skip
    """Return the descriptor of each piece of x (rows, D), whose dims are contiguous."""
    block = tl.make_tensor_descriptor(x, [rows, D], [stride_t, 1], [BLOCK_T, BLOCK_D])
    if REST_D == 0:
        pieces = (block,)
    else:
        rest = tl.make_tensor_descriptor(x, [rows, D], [stride_t, 1], [BLOCK_T, REST_D])
        pieces = block, rest  # type: ignore[assignment]
    return pieces


@triton.jit
def load_pieces(descriptors, first):
    """Return a tile: rows from `first` on of the operand that `describe` described."""
    block = descriptors[0].load([first, 0])
    return (
        (block,) if len(descriptors) == 1 else (block, descriptors[1].load([first, block.shape[1]]))
    )


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr):
    """Return a tile (ROWS, D) of zeros, in fp32."""
    block = tl.zeros([ROWS, BLOCK_D], tl.float32)
    return (block,) if REST_D == 0 else (block, tl.zeros([ROWS, REST_D], tl.float32))


@triton.jit
def scaled(tile, factor):
    """Return a tile times a factor, a number or (rows, 1)."""
    return (tile[0] * factor,) if len(tile) == 1 else (tile[0] * factor, tile[1] * factor)


@triton.jit
def divided(tile, divisor):
    """Return a tile divided by (rows, 1)."""
    return (tile[0] / divisor,) if len(tile) == 1 else (tile[0] / divisor, tile[1] / divisor)


@triton.jit
def added(x, y):
    """Return the sum of two tiles."""
    return (x[0] + y[0],) if len(x) == 1 else (x[0] + y[0], x[1] + y[1])


@triton.jit
def dot_of_rows(x, y, PRECISION: tl.constexpr):
    """Return x·yᵀ (rows of x, rows of y) of two tiles."""
    dot = tl.dot(x[0], y[0].T, input_precision=PRECISION)
    if len(x) == 2:
        dot = tl.dot(x[1], y[1].T, dot, input_precision=PRECISION)
    return dot


@triton.jit
def add_dot(total, p, y, PRECISION: tl.constexpr):
    """Return the tile `total` + p·y, of p (rows, rows of y) in any dtype and the tile y."""
    p = p.to(y[0].dtype)
    block = tl.dot(p, y[0], total[0], input_precision=PRECISION)
    return (
        (block,) if len(y) == 1 else (block, tl.dot(p, y[1], total[1], input_precision=PRECISION))
    )


@triton.jit
def store_rows(at, tile, rows, stride_t, row_mask, D: tl.constexpr):
    """Store a tile to rows of `at` (·, D) under a mask; their dims are contiguous."""
    at += rows[:, None] * stride_t
    store_piece(at, tile[0], row_mask, D, 0)
    if len(tile) == 2:
        store_piece(at, tile[1], row_mask, D, tile[0].shape[1])


@triton.jit
def store_piece(at, piece, row_mask, D: tl.constexpr, FIRST_D: tl.constexpr):
    """Store a piece to the dims from FIRST_D on of rows at addresses `at` (rows, 1)."""
    d = FIRST_D + tl.arange(0, piece.shape[1])
    mask = within(row_mask, d, D, FIRST_D + piece.shape[1])
    tl.store(at + d[None, :], piece.to(at.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(total, tile, row, rows, row_mask, stride_t, D: tl.constexpr):
    """Add a tile to rows of total (·, D) from `row` on, under a mask or None."""
    at = total + row.to(tl.int64) * stride_t + rows[:, None] * stride_t
    add_piece(at, tile[0], row_mask, D, 0)
    if len(tile) == 2:
        add_piece(at, tile[1], row_mask, D, tile[0].shape[1])


@triton.jit
def add_piece(at, piece, row_mask, D: tl.constexpr, FIRST_D: tl.constexpr):
    """Add a piece to the dims from FIRST_D on of rows at addresses `at` (rows, 1)."""
    d = FIRST_D + tl.arange(0, piece.shape[1])
    # A reduction (red.add): without a load, kernels keep accumulators in registers. In the
    # deterministic backward one program per launch adds to each element, so order does not matter.
    mask = within(row_mask, d, D, FIRST_D + piece.shape[1])
    tl.atomic_add(at + d[None, :], piece, mask=mask, sem="relaxed")


@triton.jit
def scores_of(dot, scale, cap, SOFTCAP: tl.constexpr):
    """Return scores in units of log2 from dot = q·k.

    They are scale · q·k, or with SOFTCAP cap · tanh(scale · q·k).
    """
    s = dot * scale
    if SOFTCAP:
        s = cap * tanh(s)
    return s


@triton.jit
def tanh(x):
    """Return tanh of x to fp32 rounding.

    Near 0, where 1 − e^{−2|x|} cancels, its series up to x¹¹ is used.
    """
    square = x * x
    series = 0.0218694885 - square * 0.0088632355
    series = -0.0539682540 + square * series
    series = 0.1333333333 + square * series
    series = -0.3333333333 + square * series
    series = 1.0 + square * series
    e = tl.exp2(-2.885390081777927 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.09, x * series, tl.where(x < 0, -far, far))


@triton.jit
def bias_of(slope, row_position, column_position):
    """Return (rows, columns): slope · distance, which is subtracted from scores.

    The slope is one head's, in units of log2, and positions are (rows,) and (columns,). Distances
    are exact integers; the difference of two products of slope and position would lose digits.
    """
    return slope * tl.abs(column_position[None, :] - row_position[:, None]).to(tl.float32)


@triton.jit
def slope(
    dot, dp, lse2, delta, bias, scale, cap,
    FLIP: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Return (p, dscore / scale) of a block of pairs, from dot = q·k and dp = dout·v.

    All have one shape. lse2, in units of log2, and delta broadcast along the keys. With ALIBI a
    bias is subtracted from scores. The derivative of softcap is 1 − tanh², tanh being s / cap.
    """
    if FLIP:
        dot = -dot
    s = scores_of(dot, scale, cap, SOFTCAP)
    p = tl.exp2(s - bias - lse2) if ALIBI else tl.exp2(s - lse2)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds *= 1.0 - (s / cap) * (s / cap)
    return p, ds


@triton.jit
def visible_pairs(entry, tile_start, rows, columns, row_positions, column_positions):
    """Return (rows, columns) bool: whether each row of a tile attends to each column of a block.

    `entry` is the block's entry of `cut` (`tables.py` names its columns). `rows` and `columns` are
    offsets from the start of the tile and of the block. Positions are (T,) of all rows and (Tk,) of
    all columns.
    """
    column, column_stop = tl.load(entry + COLUMN_START), tl.load(entry + COLUMN_STOP)
    low, high = tl.load(entry + BAND_LOW), tl.load(entry + BAND_HIGH)
    row_start, row_stop = tl.load(entry + ROW_START), tl.load(entry + ROW_STOP)
    row, col = tile_start + rows, column + columns
    in_rows, in_columns = (row >= row_start) & (row < row_stop), col < column_stop
    row_position = tl.load(row_positions + row, mask=in_rows, other=0)
    column_position = tl.load(column_positions + col, mask=in_columns, other=0)
    distance = column_position[None, :] - row_position[:, None]
    return (distance >= low) & (distance <= high) & in_rows[:, None] & in_columns[None, :]


@triton.jit
def program(tiles, tile_count, heads, batch_heads, head_block):
    """Return (address of the tile's entry of `tiles`, batch, head) of this program.

    Programs process all tiles in order for `head_block` of the `batch_heads` = B · `heads` heads,
    then for the next heads. Concurrent programs then read the keys and values of few heads, which
    stay in the second-level cache.
    """
    pid = tl.program_id(0)
    per_block = tile_count * head_block
    block = pid // per_block
    in_block = tl.minimum(head_block, batch_heads - block * head_block)
    offset = pid - block * per_block
    batch_head = block * head_block + offset % in_block
    tile = tiles + (offset // in_block) * TILE_WIDTH
    return tile, (batch_head // heads).to(tl.int64), batch_head % heads


@triton.jit
def rows_of_program(rows_total, heads, TILE_ROWS: tl.constexpr):
    """Return (batch, head, row, rows, valid) of a program that has TILE_ROWS rows of one head.

    `row` is its first row, and `rows` (TILE_ROWS,) are all of them, `valid` below `rows_total`.
    Programs are numbered in one dimension, since the other dimensions have at most 65,535. Heads
    come first, as they do in memory, so that concurrent programs use adjacent memory.
    """
    tiles = tl.cdiv(rows_total, TILE_ROWS)
    head = (tl.program_id(0) % heads).to(tl.int64)
    batch_tile = tl.program_id(0) // heads
    row = batch_tile % tiles * TILE_ROWS
    rows = row + tl.arange(0, TILE_ROWS)
    return (batch_tile // tiles).to(tl.int64), head, row, rows.to(tl.int64), rows < rows_total
