"""Lightning attention over segments of spans, forward or from the end.

Qin et al., "Lightning Attention-2" (2024), section 3.2, algorithms 1 and 2, with segments side by side: the state before
each comes from `states.py`. In rows of a chunk the products of rows with rows are masked by the decay, and what came before
the chunk is one product with the state. One kernel serves four ends, as linear attention's gradients are linear attentions:
    out = (q, k, v),  dq = (dout, v, k) on transposed states;  from the end: dv = (k, q, dout),  dk = (v, dout, q), transposed.
What is contracted can be cut as well, since out is linear in it: parts of D, one after another, add to out.
B batch, T rows, H heads, D the dim that is contracted, Dv that of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .tables import Plan
from .tiles import load_chunk, load_state, power, program, rate_of, store_chunk


@triton.jit
def lightning_recurrence(
    x, y, z, out, between, initial, log_decay, segments, tiles, heads, batches, scale, state_scale,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, z_b, z_t, z_h, z_d, o_b, o_t, o_h, s_d, s_v,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    SHARING: tl.constexpr, MEMBERS: tl.constexpr, REVERSE: tl.constexpr, INITIAL: tl.constexpr, FROM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of columns of one segment and head, contracted over BLOCK_D dims, from `FROM` on: added to out if that is not 0.

    `SHARING` heads have one state, which sums `MEMBERS` heads of y and z. It is kept times the scale. Chunks begin where the
    walk does, so that only the last may be short of rows; what the state would be after that one, nobody reads.
    """
    segment, batch, head, tile = program(segments, tiles, heads, batches)
    first, stop = tl.load(segment), tl.load(segment + 1)
    rows = (stop - first).to(tl.int32)
    state_head, pairs = head // SHARING, batches * (heads // SHARING)
    pair = batch * (heads // SHARING) + state_head
    rate, rate2 = rate_of(log_decay, state_head)
    p, d, dv = tl.arange(0, ROWS), FROM + tl.arange(0, BLOCK_D), tile * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * x_h + first * x_t
    y += batch * y_b + state_head * MEMBERS * y_h + first * y_t
    z += batch * z_b + state_head * MEMBERS * z_h + first * z_t
    out += batch * o_b + head * o_h + first * o_t

    state = load_state(between, tl.load(segment + 5), pair, pairs, d, dv, s_d, s_v, D, DV)
    if INITIAL:
        if REVERSE:
            distance = tl.load(segment + 3) - stop
        else:
            distance = first - tl.load(segment + 2)
        whole, rest = power(rate, distance)
        entering = load_state(initial, tl.load(segment + 4), pair, pairs, d, dv, s_d, s_v, D, DV)
        state += entering * (whole + rest)
    state *= state_scale

    before, after = tl.exp2(rate2 * (p + 1)), tl.exp2(rate2 * (ROWS - 1 - p))
    distance = p[:, None] - p[None, :]
    if REVERSE:
        before, after, distance = after, before, -distance
    decay = tl.where(distance >= 0, tl.exp2(rate2 * tl.maximum(distance, 0)) * scale, 0.0)
    after *= scale
    whole, rest = power(rate, tl.full([], ROWS, tl.int32))
    for start in tl.range(0, rows, ROWS):
        if REVERSE:
            at = rows - ROWS - start
        else:
            at = start
        x_rows = load_chunk(x, at, rows, d, x_t, x_d, ROWS, D, BLOCK_D)
        acc = tl.dot(x_rows, state.to(x_rows.dtype), input_precision=PRECISION) * before[:, None]
        state = state * whole + state * rest
        for member in range(MEMBERS):
            y_rows = load_chunk(y + member * y_h, at, rows, d, y_t, y_d, ROWS, D, BLOCK_D)
            z_rows = load_chunk(z + member * z_h, at, rows, dv, z_t, z_d, ROWS, DV, BLOCK_DV)
            s = tl.dot(x_rows, y_rows.T, input_precision=PRECISION) * decay
            acc = tl.dot(s.to(z_rows.dtype), z_rows, acc, input_precision=PRECISION)
            weighted = (z_rows * after[:, None]).to(z_rows.dtype)
            state = tl.dot(y_rows.T, weighted, state, input_precision=PRECISION)
        if FROM > 0:
            acc += load_chunk(out, at, rows, dv, o_t, 1, ROWS, DV, BLOCK_DV)
        store_chunk(out, acc, at, rows, dv, o_t, ROWS, DV, BLOCK_DV)


def recurrence(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    plan: Plan,
    config: configs.Config,
    *,
    out: Tensor,
    between: Tensor,
    initial: Tensor | None,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
) -> None:
    """Write scale · Σ_j λ^|i−j| (x_i·y_j) z_j over the rows j of a span up to i, or `reverse`, from i on, to out (B, T, H, Dv).

    x is (B, T, H, D); y (B, T, Hy, D) and z (B, T, Hy, Dv) have fewer heads, which heads of x share, or more, which are summed.
    `between` (slots, B, Hkv, D, Dv) are the states before each segment, from `states`, and `initial` (n, B, Hkv, D, Dv)
    those which enter spans. The forward walk multiplies states by the scale, that from the end has it in them already. Both
    are fp32, contiguous or the transpose (`mT`) of what is. log_decay (Hkv,) is fp64.
    """
    (x, y, z), dim, value_dim = configs.addressable(x, y, z), x.shape[-1], z.shape[-1]
    flags = configs.constants(config, x.dtype) | {
        "D": dim, "DV": value_dim, "BLOCK_D": min(config.depth, configs.padded(dim)), "BLOCK_DV": config.tile(value_dim),
        "SHARING": max(1, x.shape[2] // y.shape[2]), "MEMBERS": max(1, y.shape[2] // x.shape[2]),
        "REVERSE": reverse, "INITIAL": initial is not None,
    }  # fmt: skip
    tiles = triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = [
        x, y, z, out, between, between if initial is None else initial, log_decay, plan.segments,
        tiles, x.shape[2], x.shape[0], scale, 1.0 if reverse else scale,
        *(s for t in (x, y, z) for s in t.stride()), *out.stride()[:3], *between.stride()[-2:],
    ]  # fmt: skip
    for first in range(0, dim, flags["BLOCK_D"]):
        flags["FROM"] = first
        configs.launch(lightning_recurrence, plan.segments, tiles * x.shape[2] * x.shape[0], config, arguments, flags)
