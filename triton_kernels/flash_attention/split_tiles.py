"""Merging partial results inside the forward, and the launch that merges the parts of split tiles.

A partial result is (out, lse) of some keys. Partial results of disjoint keys merge like the blocks
of FlashAttention-2 (Dao 2023, section 3.1): each has a maximum, here its lse, and an accumulator.
Between launches, out is kept in fp32 and the natural lse in fp64 (docs/decisions/softmax.md has the
reason). If a launch has few tiles, several programs share the columns of each tile, as in
Flash-Decoding (Dao et al. 2023), and a second launch merges their partial results.

Sizes: B batch, T query rows, H heads, DV (Dv) head dim of out, P parts of a tile.

Strides are arguments named `operand_dimension`, in elements. Dimensions: s parts, b batch, t rows,
h heads; rows of DV elements are contiguous. Operands: o is out, l is lse, p is partial_out, r is
partial_lse; s is split_out and u is split_lse, with one partial result per part.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..specialisation import kernel
from .configs import Config, padded
from .launching import Prepared, strides
from .tables import FLAGS, LAST, TILE_START, TILE_STOP, Launch
from .tiles import LN_2, LOG2_E, program, within

# In fp32 this has the effect of no sink, with any lse. A sink of −∞ is replaced by it, since −∞
# minus the lse of a row without keys, which is −∞ too, would be NaN.
_LEAST_SINK = tl.constexpr(-1e30)


@triton.jit
def join(
    m, z, acc, partial_out, partial_lse, rows, dv, continued, p_t, r_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Return (m, z, acc) of a tile, merged with a partial result.

    They are the running maximum and sum (TILE_ROWS,) and the accumulator (TILE_ROWS, BLOCK_DV), as
    in `flash_forward`. `partial_out` and `partial_lse` are addresses of the tile's first row in one
    head. Only rows in the mask `continued` have a partial result; the other rows do not change.
    """
    partial_lse2 = tl.load(partial_lse + rows * r_t, mask=continued, other=float("-inf")) * LOG2_E
    m_new = tl.maximum(m, partial_lse2.to(tl.float32))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m - finite), tl.exp2((partial_lse2 - finite).to(tl.float32))
    # Masked: a branch around this code spilled 208 bytes in the fp32 kernels' loops.
    mask = within(continued, dv, DV, BLOCK_DV)
    partial = tl.load(partial_out + rows[:, None] * p_t + dv[None, :], mask=mask, other=0.0)
    return m_new, z * alpha + beta, acc * alpha[:, None] + partial * beta[:, None]


@triton.jit
def finish(
    m, z, acc, out, lse, partial_out, partial_lse, sink, rows, dv, in_tile, flags,
    o_t, l_t, p_t, r_t, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_PARTIAL: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide acc by z and store it, the last step of algorithm 1.

    A finished tile goes to out and lse, another one to the partial result. Addresses point to the
    tile's first row in one head. A row without keys has out 0 and lse −inf. A sink is a logit that
    joins the denominator of out, but not lse: out is multiplied by the keys' fraction of the sum.
    """
    blind = z == 0.0
    total = tl.where(blind, 1.0, z)
    acc = acc / total[:, None]
    lse2 = tl.where(blind, float("-inf"), m.to(tl.float64) + tl.log2(total).to(tl.float64))
    if HAS_PARTIAL:
        unfinished = in_tile & (flags // LAST == 0)
        mask = within(unfinished, dv, DV, BLOCK_DV)
        tl.store(partial_out + rows[:, None] * p_t + dv[None, :], acc, mask=mask)
        tl.store(partial_lse + rows * r_t, lse2 * LN_2, mask=unfinished)
    finished = in_tile & (flags // LAST == 1)
    tl.store(lse + rows * l_t, (lse2 * LN_2).to(tl.float32), mask=finished)
    if HAS_SINKS:
        logit = tl.load(sink).to(tl.float32)
        logit = tl.maximum(logit, _LEAST_SINK, propagate_nan=tl.PropagateNan.ALL)
        keys_fraction = 1.0 / (1.0 + tl.exp2(logit * LOG2_E - lse2.to(tl.float32)))
        acc = acc * keys_fraction[:, None]
    mask = within(finished, dv, DV, BLOCK_DV)
    at = out + rows[:, None] * o_t + dv[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@kernel
def flash_merge(
    split_out, split_lse, out, lse, partial_out, partial_lse, sinks, tiles,
    tile_count, heads, batch_heads, parts,
    s_s, s_b, s_t, s_h, u_s, u_b, u_t, u_h, o_b, o_t, o_h, l_b, l_t, l_h,
    p_b, p_t, p_h, r_b, r_t, r_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr,
    HAS_PARTIAL: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query tile of one head, whose columns were split.

    The parts are merged in the order of their columns. split_out is (P, B, T, H, Dv) and split_lse
    (P, B, T, H). For the other tensors see `prepare_merge`.
    """
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, batch_heads)
    row, row_stop = tl.load(tile + TILE_START), tl.load(tile + TILE_STOP)
    flags = tl.load(tile + FLAGS)
    rows, dv = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_DV)
    row64, head64 = row.to(tl.int64), head.to(tl.int64)
    in_tile = rows < row_stop - row
    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    z = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, BLOCK_DV], tl.float32)
    partial_out += batch * p_b + head64 * p_h + row64 * p_t
    partial_lse += batch * r_b + head64 * r_h + row64 * r_t
    if HAS_PARTIAL:
        continued = in_tile & (flags % LAST == 0)  # not FIRST
        m, z, acc = join(
            m, z, acc, partial_out, partial_lse, rows, dv, continued, p_t, r_t, DV, BLOCK_DV
        )
    split_out += batch * s_b + head64 * s_h + row64 * s_t
    split_lse += batch * u_b + head64 * u_h + row64 * u_t
    for part in range(parts):
        part64 = tl.full([], part, tl.int64)
        part_out, part_lse = split_out + part64 * s_s, split_lse + part64 * u_s
        m, z, acc = join(m, z, acc, part_out, part_lse, rows, dv, in_tile, s_t, u_t, DV, BLOCK_DV)
    out += batch * o_b + head64 * o_h + row64 * o_t
    lse += batch * l_b + head64 * l_h + row64 * l_t
    finish(
        m, z, acc, out, lse, partial_out, partial_lse, sinks + head, rows, dv, in_tile, flags,
        o_t, l_t, p_t, r_t, DV, BLOCK_DV, HAS_PARTIAL, HAS_SINKS,
    )  # fmt: skip


def prepare_merge(
    launch: Launch,
    config: Config,
    flags: dict[str, Any],
    parts: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Prepared:
    """Return the launch that merges the parts of a launch's tiles into the results.

    The parts are (P, B, T, H, Dv) and (P, B, T, H). The results are `out` (B, T, H, Dv) and `lse`
    (B, T, H), which take finished tiles, and the running `partial_out` fp32 and `partial_lse` fp64
    of the same shapes, which take all others. Its tensors are all these and the sinks (H,).
    """
    batch, _, heads, value_dim = results[0].shape
    tile_count, batch_heads = launch.tiles.shape[0], batch * heads
    arguments = launch.tiles, tile_count, heads, batch_heads, launch.merges
    of_parts = (stride for x in parts for stride in (x.stride(0), *strides(x[0], 3)))
    of_results = (stride for x in results for stride in strides(x, 3))
    sizes = {"DV": value_dim, "BLOCK_DV": padded(value_dim), "TILE_ROWS": config.tile_rows}
    flags = flags | sizes | {"num_warps": 8, "num_stages": 1}
    grid, device = (tile_count * batch_heads,), launch.tiles.device
    return Prepared(flash_merge, grid, device, (*arguments, *of_parts, *of_results), flags)
