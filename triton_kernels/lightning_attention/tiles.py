"""What the kernels share.

That is which rows, head and block a program computes, chunks of rows, blocks of states, and decays.
A head's decay is λ = exp(rate) with rate <= 0, in fp64. Powers over many rows come from fp64. Those
within a chunk, or used for one row alone, are exp2 of an fp32 product, whose relative error of
2^-24 in the exponent e moves 2^-e by less than 2^-24.

Sizes: CHUNK_ROWS rows of an operand are loaded at a time, D and DV are the head dims of a state,
and BLOCK_D and BLOCK_DV those of the block that a program computes. `stride_t` and `stride_d` are
an operand's strides along rows and head dim, and s_d and s_v a state's along D and DV, in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..flash_attention.tiles import LOG2_E
from .tables import SEGMENT_WIDTH


@triton.jit
def program(segments, blocks, heads, batches):
    """Return (address of the segment's entry, batch, head, block) of this program.

    The `blocks` of one head run together, then heads, then batches.
    """
    pid = tl.program_id(0)
    head, batch = pid // blocks % heads, pid // (blocks * heads) % batches
    segment = pid // (blocks * heads * batches)
    entry = segments + segment * SEGMENT_WIDTH
    return entry, batch.to(tl.int64), head.to(tl.int64), pid % blocks


@triton.jit
def rate_of(log_decay, head):
    """Return (ln λ in fp64, log2 λ in fp32) of a KV head; log_decay is (Hkv,)."""
    rate = tl.load(log_decay + head)
    return rate, (rate * LOG2_E).to(tl.float32)


@triton.jit
def power(rate, exponent):
    """Return λ^exponent as nearest + rest: 0 or 1, and what it differs by in fp32.

    The error of the rest is relative to what a state forgets, not to what it keeps. A state that is
    multiplied by the two, however often, is so by λ^exponent to within one rounding; a factor that
    is rounded to fp32 in one piece would be off each time, always the same way.
    """
    exact = tl.exp(rate * exponent.to(tl.float64))
    nearest = tl.where(exact > 0.5, 1.0, 0.0)
    return nearest, (exact - nearest).to(tl.float32)


@triton.jit
def within(row_mask, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (rows, BLOCK_D) bool: the rows of a mask, in dims below D.

    `row_mask` is (rows,), and the dims d are (BLOCK_D,).
    """
    mask = row_mask[:, None]
    if D % BLOCK_D != 0:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def load_chunk(
    x, at, rows, d, stride_t, stride_d,
    CHUNK_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return (CHUNK_ROWS, BLOCK_D): rows `at` and on of x, and its dims d (BLOCK_D,).

    Zeros stand for rows before 0 and from `rows` on, and for dims from D on.
    """
    row = at + tl.arange(0, CHUNK_ROWS)
    mask = within((row >= 0) & (row < rows), d, D, BLOCK_D)
    x += tl.full([], at, tl.int64) * stride_t
    address = x + tl.arange(0, CHUNK_ROWS)[:, None] * stride_t + d[None, :] * stride_d
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def store_chunk(
    x, values, at, rows, d, stride_t,
    CHUNK_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store values (CHUNK_ROWS, BLOCK_D) where `load_chunk` would load them.

    They are rounded to x's type.
    """
    row = at + tl.arange(0, CHUNK_ROWS)
    mask = within((row >= 0) & (row < rows), d, D, BLOCK_D)
    x += tl.full([], at, tl.int64) * stride_t
    address = x + tl.arange(0, CHUNK_ROWS)[:, None] * stride_t + d[None, :]
    tl.store(address, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_state(states, slot, pair, pairs, d, dv, s_d, s_v, D: tl.constexpr, DV: tl.constexpr):
    """Return (BLOCK_D, BLOCK_DV): dims d and dv of the state in a slot.

    It is that of one of its `pairs` of batch and KV head. states is (slots, pairs, D, DV); a slot
    of −1 gives zeros.
    """
    mask = (d < D)[:, None] & (dv < DV)[None, :] & (slot >= 0)
    at = states + (slot * pairs + pair) * D * DV
    return tl.load(at + d[:, None] * s_d + dv[None, :] * s_v, mask=mask, other=0.0)
