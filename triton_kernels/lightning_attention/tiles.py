"""What the kernels share: which rows, head and tile a program computes, chunks of rows, tiles of states, and decays.

A head's decay is λ = exp(rate) with rate <= 0, in fp64. Powers over many rows come from fp64. Those within a chunk, or used
for one row alone, are exp2 of an fp32 product, whose relative error of 2^-24 in the exponent e moves 2^-e by less than 2^-24.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..flash_attention.tiles import LOG2_E


@triton.jit
def program(segments, tiles, heads, batches):
    """(address of the segment's entry, batch, head, tile) of this program; tiles of one head run together, then heads."""
    pid = tl.program_id(0)
    head, batch = pid // tiles % heads, pid // (tiles * heads) % batches
    segment = pid // (tiles * heads * batches)
    return segments + segment * 6, batch.to(tl.int64), head.to(tl.int64), pid % tiles


@triton.jit
def rate_of(log_decay, head):
    """(ln λ in fp64, log2 λ in fp32) of a KV head."""
    rate = tl.load(log_decay + head)
    return rate, (rate * LOG2_E).to(tl.float32)


@triton.jit
def power(rate, exponent):
    """λ^exponent as 0 or 1 and the rest in fp32, whose error is relative to what a state forgets, not to what it keeps.

    A state that is multiplied by the two, however often, is so by λ^exponent to within one rounding; a factor that is rounded
    to fp32 as a whole would be off each time, always the same way.
    """
    exact = tl.exp(rate * exponent.to(tl.float64))
    whole = tl.where(exact > 0.5, 1.0, 0.0)
    return whole, (exact - whole).to(tl.float32)


@triton.jit
def within(there, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) bool: rows that are there, and columns before D, of tiles of BLOCK_D."""
    mask = there[:, None]
    if D % BLOCK_D != 0:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def load_chunk(x, at, rows, d, stride_t, stride_d, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(ROWS, BLOCK_D) rows at … of x and columns d, with zeros outside of rows 0 … `rows` and from column D on."""
    row = at + tl.arange(0, ROWS)
    mask = within((row >= 0) & (row < rows), d, D, BLOCK_D)
    x += tl.full([], at, tl.int64) * stride_t
    return tl.load(x + tl.arange(0, ROWS)[:, None] * stride_t + d[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def store_chunk(x, values, at, rows, d, stride_t, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what `load_chunk` would load, rounded to x's type."""
    row = at + tl.arange(0, ROWS)
    mask = within((row >= 0) & (row < rows), d, D, BLOCK_D)
    x += tl.full([], at, tl.int64) * stride_t
    tl.store(x + tl.arange(0, ROWS)[:, None] * stride_t + d[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_state(states, slot, pair, pairs, d, dv, s_d, s_v, D: tl.constexpr, DV: tl.constexpr):
    """A tile of the state in a slot, of one batch and KV head of all `pairs`; zero if the slot is −1."""
    mask = (d < D)[:, None] & (dv < DV)[None, :] & (slot >= 0)
    at = states + (slot * pairs + pair) * D * DV
    return tl.load(at + d[:, None] * s_d + dv[None, :] * s_v, mask=mask, other=0.0)
