"""FlashAttention-2's forward over a tile table, continuing a partial result.

Dao, "FlashAttention-2" (2023), section 3.1, algorithm 1, with two changes: the key blocks that a query tile walks come from
a table (`tables.py`), full ones in one flat loop without mask or branch, then cut ones; and (out, lse) may start from the
partial result of other keys. B batch, T rows, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .merge import finish, join, merge
from .tables import TILE_WIDTH, Launch
from .tiles import load_block, load_rows, program, scores_of, seen


@triton.jit
def flash_forward(
    q, k, v, out, lse, partial_out, partial_lse, sinks, tiles, full, cut, row_positions, column_positions,
    tile_count, heads, group, batch_heads, head_block, key_rows, scale, cap,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h,
    l_b, l_t, l_h, p_s, p_b, p_t, p_h, r_s, r_b, r_t, r_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, CUT: tl.constexpr, PARTIAL: tl.constexpr, FINAL: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, FLIP: tl.constexpr, TMA: tl.constexpr, SPECIALISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one head. `FLIP` says that the scale is negative: q·k is negated and `scale` its magnitude."""
    tile, batch, head = program(tiles, tile_count, heads, batch_heads, head_block)
    row, row_stop, flags = tl.load(tile), tl.load(tile + 1), tl.load(tile + 6)
    rows, columns, dv = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_DV)
    there = rows < row_stop - row
    q += batch * q_b + head.to(tl.int64) * q_h
    k += batch * k_b + (head // group).to(tl.int64) * k_h
    v += batch * v_b + (head // group).to(tl.int64) * v_h
    if TMA and FULL:
        q_tile = tl.make_tensor_descriptor(q, [row_stop, D], [q_t, 1], [ROWS, BLOCK_D]).load([row, 0])
        k_blocks = tl.make_tensor_descriptor(k, [key_rows, D], [k_t, 1], [COLUMNS, BLOCK_D])
        v_blocks = tl.make_tensor_descriptor(v, [key_rows, DV], [v_t, 1], [COLUMNS, BLOCK_DV])
    else:
        q_tile = load_rows(q, row, row_stop, q_t, q_d, ROWS, D, BLOCK_D)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row64 = row.to(tl.int64)
    if FULL:
        start = tl.load(tile + 2)
        for j in tl.range(0, tl.load(tile + 3) - start, warp_specialize=SPECIALISE):
            column = tl.load(full + start + j)
            if TMA:
                k_block = k_blocks.load([column, 0])
            else:
                k_block = load_block(k, column, k_t, k_d, COLUMNS, D, BLOCK_D)
            s = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            if FLIP:
                s = -s
            if SOFTCAP:
                s = scores_of(s, scale, cap, SOFTCAP)
                m_new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - m_new[:, None])
            else:
                m_new = tl.maximum(m, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            z = z * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if TMA:
                v_block = v_blocks.load([column, 0])
            else:
                v_block = load_block(v, column, v_t, v_d, COLUMNS, DV, BLOCK_DV)
            acc = tl.dot(p.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
            m = m_new

    if CUT:
        start = tl.load(tile + 4)
        for j in tl.range(0, tl.load(tile + 5) - start):
            entry = cut + (start + j) * 6
            column, column_stop = tl.load(entry), tl.load(entry + 1)
            k_block = load_rows(k, column, column_stop, k_t, k_d, COLUMNS, D, BLOCK_D)
            s = tl.dot(q_tile, k_block.T, input_precision=PRECISION)
            if FLIP:
                s = -s
            s = scores_of(s, scale, cap, SOFTCAP)
            s = tl.where(seen(entry, row, rows, columns, row_positions, column_positions), s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - finite[:, None])
            alpha = tl.exp2(m - finite)
            z = z * alpha + tl.sum(p, 1)
            v_block = load_rows(v, column, column_stop, v_t, v_d, COLUMNS, DV, BLOCK_DV)
            acc = tl.dot(p.to(v_block.dtype), v_block, acc * alpha[:, None], input_precision=PRECISION)
            m = m_new

    if PARTIAL:
        part = tl.load(tile + 7).to(tl.int64)
        partial_out += part * p_s + batch * p_b + head.to(tl.int64) * p_h + row64 * p_t
        partial_lse += part * r_s + batch * r_b + head.to(tl.int64) * r_h + row64 * r_t
        begun = there & (flags % 2 == 0)
        m, z, acc = join(m, z, acc, partial_out, partial_lse, rows, dv, begun, p_t, r_t, DV, BLOCK_DV)
    out += batch * o_b + head.to(tl.int64) * o_h + row64 * o_t
    lse += batch * l_b + head.to(tl.int64) * l_h + row64 * l_t
    finish(m, z, acc, out, lse, partial_out, partial_lse, sinks + head, rows, dv, there, flags, o_t, l_t, p_t, r_t,
           DV, BLOCK_DV, PARTIAL, FINAL, SINKS)  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    launches: list[Launch],
    config: configs.Config,
    *,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Attention of q (B, T, Hq, D) over k (B, Tk, Hkv, D) and v (B, Tk, Hkv, Dv), for one hop of a table.

    Tiles that the table calls last are written to `out` (B, T, Hq, Dv), in its dtype and with the `sinks` (Hq,) in the
    denominator, and to `lse` (B, T, Hq) fp32, natural, without them. The others are read from and left in `partial_out`
    (B, T, Hq, Dv) fp32 and `partial_lse` (B, T, Hq) fp64. q, k and v may have any strides; the others' last is 1.
    """
    (q, k, v), tma = configs.prepare(config, q, k, v)
    batch, _, heads, dim = q.shape
    value_dim = v.shape[-1]
    running = (out, lse) if partial_out is None or partial_lse is None else (partial_out, partial_lse)
    ends = (out, lse, *running, lse if sinks is None else sinks)
    parts: tuple[Tensor, Tensor] | None = None
    for launch in launches:
        flags: dict[str, Any] = {"PARTIAL": launch.has_partial, "FINAL": launch.has_final, "SINKS": sinks is not None}
        programs = launch.tiles.numel() // TILE_WIDTH * batch * heads
        if launch.merges:
            assert parts is not None  # of the launch before
            merge(parts, ends, launch, config, flags)
            continue
        target, apart = running, (0, 0)
        if launch.parts > 1:
            parts = empty_partial(q.expand(launch.parts, *q.shape), value_dim)
            target, apart = (parts[0][0], parts[1][0]), (parts[0].stride(0), parts[1].stride(0))
        group = heads // k.shape[2]
        arguments = [
            q, k, v, out, lse, *target, ends[-1], *launch.arrays,
            programs // (batch * heads), heads, group, batch * heads, configs.head_block(k, v, group, batch * heads),
            k.shape[1],
            *configs.scoring(scale, softcap), *(s for x in (q, k, v) for s in x.stride()),
            *(s for x in (out, lse) for s in x.stride()[:3]),
            apart[0], *target[0].stride()[:3], apart[1], *target[1].stride()[:3],
        ]  # fmt: skip
        flags |= configs.constants(config, dim, value_dim, q.dtype, tma) | {
            "FULL": launch.has_full, "CUT": launch.has_cut, "SOFTCAP": softcap != 0, "FLIP": scale < 0,
            "SPECIALISE": config.specialise and tma and not launch.has_cut,
        }  # fmt: skip
        configs.run(flash_forward, (programs,), q.device, arguments, flags, *config.resources(launch.has_cut))


def empty_partial(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """(out fp32, lse fp64) of q's rows, not initialised: every tile's first hop writes them."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, value_dim), dtype=torch.float32), q.new_empty(rows, dtype=torch.float64)
