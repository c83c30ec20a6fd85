"""Joining partial results inside a kernel, and the launch that joins the parts of tiles whose keys were split.

Parts over disjoint keys merge as the blocks of FlashAttention-2 do: each brings its maximum (here its lse) and its
accumulator. What is kept between launches is out in fp32 and the natural lse in fp64 (docs/decisions.md says why).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .tables import TILE_WIDTH, Launch
from .tiles import LN_2, LOG2_E, program, within


@triton.jit
def join(m, z, acc, partial_out, partial_lse, rows, dv, begun, p_t, r_t, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The running maximum, sum and accumulator, joined by the partial result of rows where `begun`."""
    before2 = tl.load(partial_lse + rows * r_t, mask=begun, other=float("-inf")) * LOG2_E
    m_new = tl.maximum(m, before2.to(tl.float32))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m - finite), tl.exp2((before2 - finite).to(tl.float32))
    mask = within(begun, dv, DV, BLOCK_DV)
    before = tl.load(partial_out + rows[:, None] * p_t + dv[None, :], mask=mask, other=0.0)
    return m_new, z * alpha + beta, acc * alpha[:, None] + before * beta[:, None]


@triton.jit
def finish(
    m, z, acc, out, lse, partial_out, partial_lse, sink, rows, dv, there, flags, o_t, l_t, p_t, r_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTIAL: tl.constexpr, FINAL: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum and store: the result where the tile is finished, a partial one where it is not."""
    blind = z == 0.0
    total = tl.where(blind, 1.0, z)
    acc = acc / total[:, None]
    lse2 = tl.where(blind, float("-inf"), m.to(tl.float64) + tl.log2(total).to(tl.float64))
    if PARTIAL:
        leaves = there & (flags // 2 == 0)
        tl.store(partial_out + rows[:, None] * p_t + dv[None, :], acc, mask=within(leaves, dv, DV, BLOCK_DV))
        tl.store(partial_lse + rows * r_t, lse2 * LN_2, mask=leaves)
    if FINAL:
        ends = there & (flags // 2 == 1)
        tl.store(lse + rows * l_t, (lse2 * LN_2).to(tl.float32), mask=ends)
        if SINKS:
            share = 1.0 / (1.0 + tl.exp2(tl.load(sink).to(tl.float32) * LOG2_E - lse2.to(tl.float32)))
            acc = acc * share[:, None]
        tl.store(out + rows[:, None] * o_t + dv[None, :], acc.to(out.dtype.element_ty), mask=within(ends, dv, DV, BLOCK_DV))


@triton.jit
def flash_merge(
    split_out, split_lse, out, lse, partial_out, partial_lse, sinks, tiles, tile_count, heads, batch_heads, parts,
    s_s, s_b, s_t, s_h, u_s, u_b, u_t, u_h, o_b, o_t, o_h, l_b, l_t, l_h, p_b, p_t, p_h, r_b, r_t, r_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, PARTIAL: tl.constexpr, FINAL: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query tile of one head, whose keys were split over several programs, in their order."""
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, batch_heads)
    row, row_stop, flags = tl.load(tile), tl.load(tile + 1), tl.load(tile + 6)
    rows, dv, row64, head64 = tl.arange(0, ROWS), tl.arange(0, BLOCK_DV), row.to(tl.int64), head.to(tl.int64)
    there = rows < row_stop - row
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    partial_out += batch * p_b + head64 * p_h + row64 * p_t
    partial_lse += batch * r_b + head64 * r_h + row64 * r_t
    if PARTIAL:
        m, z, acc = join(m, z, acc, partial_out, partial_lse, rows, dv, there & (flags % 2 == 0), p_t, r_t, DV, BLOCK_DV)
    split_out += batch * s_b + head64 * s_h + row64 * s_t
    split_lse += batch * u_b + head64 * u_h + row64 * u_t
    for part in range(parts):
        at = tl.full([], part, tl.int64)
        m, z, acc = join(m, z, acc, split_out + at * s_s, split_lse + at * u_s, rows, dv, there, s_t, u_t, DV, BLOCK_DV)
    out += batch * o_b + head64 * o_h + row64 * o_t
    lse += batch * l_b + head64 * l_h + row64 * l_t
    finish(m, z, acc, out, lse, partial_out, partial_lse, sinks + head, rows, dv, there, flags, o_t, l_t, p_t, r_t,
           DV, BLOCK_DV, PARTIAL, FINAL, SINKS)  # fmt: skip


def merge(
    parts: tuple[Tensor, Tensor], ends: tuple[Tensor, ...], launch: Launch, config: configs.Config, flags: dict[str, Any]
) -> None:
    """Join parts (P, B, T, H, Dv) and (P, B, T, H) into `ends`: out, lse, the running partial's two, and the sinks."""
    batch, _, heads, value_dim = ends[0].shape
    tiles = launch.tiles.numel() // TILE_WIDTH
    strides = [s for x in parts for s in x.stride()[:4]] + [s for x in ends[:4] for s in x.stride()[:3]]
    arguments = [*parts, *ends, launch.tiles, tiles, heads, batch * heads, launch.merges, *strides]
    flags = flags | {"DV": value_dim, "BLOCK_DV": configs.padded(value_dim), "ROWS": config.rows}
    configs.run(flash_merge, (tiles * batch * heads,), ends[0].device, arguments, flags, 8, 1)
