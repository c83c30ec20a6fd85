"""Functions of all kernels: a program's rows, head and block, chunks, blocks of states, decays.

A head's decay is λ = exp(rate) with rate <= 0, in fp64. Powers over many rows are computed in fp64.
Powers within a chunk, or for one row only, are exp2 of an fp32 product, whose relative error of
2^-24 in the exponent e changes 2^-e by less than 2^-24.

Sizes: kernels load CHUNK_ROWS rows of an operand at a time. D and DV are the head dims of a state,
and BLOCK_D and BLOCK_DV the dims of a program's block. `stride_t` and `stride_d` are
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
    """Return (ln λ in fp64, log2 λ in fp32, at least -1e30) of a KV head; log_decay is (Hkv,)."""
    rate = tl.load(log_decay + head)
    # -inf in fp32 times a distance of 0 rows would be NaN.
    return rate, tl.maximum(rate * LOG2_E, -1e30).to(tl.float32)


@triton.jit
def power(rate, exponent):
    """Return λ^exponent as nearest + rest: 0 or 1, and the difference in fp32.

    The error of the rest is relative to the part that a state forgets, not to the part it keeps. A
    state that is multiplied by the two parts, however often, is multiplied by λ^exponent to within
    one rounding. A single fp32 factor would have the same rounding error each time.
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
    """Return (CHUNK_ROWS, BLOCK_D): rows of x from `at` on, and its dims d (BLOCK_D,).

    Rows before 0 and from `rows` on, and dims from D on, are 0.
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
    """Store values (CHUNK_ROWS, BLOCK_D), rounded to x's type, where `load_chunk` loads them."""
    row = at + tl.arange(0, CHUNK_ROWS)
    mask = within((row >= 0) & (row < rows), d, D, BLOCK_D)
    x += tl.full([], at, tl.int64) * stride_t
    address = x + tl.arange(0, CHUNK_ROWS)[:, None] * stride_t + d[None, :]
    tl.store(address, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_state(states, slot, pair, pairs, d, dv, s_d, s_v, D: tl.constexpr, DV: tl.constexpr):
    """Return (BLOCK_D, BLOCK_DV): dims d and dv of the state in a slot.

    states is (slots, pairs, D, DV), with `pairs` of batch and KV head. A slot of −1 gives zeros.
    """
    mask = (d < D)[:, None] & (dv < DV)[None, :] & (slot >= 0)
    at = states + (slot * pairs + pair) * D * DV
    return tl.load(at + d[:, None] * s_d + dv[None, :] * s_v, mask=mask, other=0.0)
