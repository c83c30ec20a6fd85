"""The states of segments, of spans, and what a state that enters a span adds to its rows.

Lightning attention's state before a segment is a scan over the states of the segments before it: they are summed side by
side, each from zero, and then joined span by span.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .tables import Plan
from .tiles import load_chunk, load_state, power, program, rate_of, store_chunk


@triton.jit
def lightning_states(
    x, y, states, log_decay, segments, tiles, heads, batches, scale, x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    MEMBERS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of one segment's state: every row has its own weight, so that the sum itself is never multiplied."""
    segment, batch, head, tile = program(segments, tiles, heads, batches)
    first, across = tl.load(segment), (DV + BLOCK_DV - 1) // BLOCK_DV
    rows = (tl.load(segment + 1) - first).to(tl.int32)
    _, rate2 = rate_of(log_decay, head)
    p = tl.arange(0, ROWS)
    d, dv = tile // across * BLOCK_D + tl.arange(0, BLOCK_D), tile % across * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * MEMBERS * x_h + first * x_t
    y += batch * y_b + head * MEMBERS * y_h + first * y_t
    state = tl.zeros([BLOCK_D, BLOCK_DV], tl.float32)
    for member in range(MEMBERS):
        for start in tl.range(0, rows, ROWS):
            x_rows = load_chunk(x + member * x_h, start, rows, d, x_t, x_d, ROWS, D, BLOCK_D)
            y_rows = load_chunk(y + member * y_h, start, rows, dv, y_t, y_d, ROWS, DV, BLOCK_DV)
            if REVERSE:
                distance = start + p + 1
            else:
                distance = rows - 1 - start - p
            weights = tl.exp2(rate2 * tl.maximum(distance, 0)) * scale
            state = tl.dot(x_rows.T, (y_rows * weights[:, None]).to(y_rows.dtype), state, input_precision=PRECISION)
    at = states + ((tl.load(segment + 5) * batches + batch) * heads + head) * D * DV
    tl.store(at + d[:, None] * DV + dv[None, :], state, mask=(d < D)[:, None] & (dv < DV)[None, :])


@triton.jit
def lightning_scan(
    states, final, log_decay, chains, lengths, blocks, heads, pairs, size, BLOCK: tl.constexpr, REVERSE: tl.constexpr
):
    """Replace the segments' own states by those before them, for some elements of one span, batch and head."""
    pid = tl.program_id(0)
    chain, pair = chains + pid // (blocks * pairs) * 3, (pid // blocks % pairs).to(tl.int64)
    first, stop, outgoing = tl.load(chain), tl.load(chain + 1), tl.load(chain + 2)
    element = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    rate, _ = rate_of(log_decay, pair % heads)
    state = tl.zeros([BLOCK], tl.float32)
    for step in range((stop - first).to(tl.int32)):
        if REVERSE:
            slot = stop - 1 - step
        else:
            slot = first + step
        at = states + (slot * pairs + pair) * size + element
        own = tl.load(at, mask=there, other=0.0)  # not initialised if it is the span's last, and its state does not leave
        tl.store(at, state, mask=there)
        whole, rest = power(rate, tl.load(lengths + slot))
        state = state * whole + state * rest + own
    if outgoing >= 0:
        tl.store(final + (outgoing * pairs + pair) * size + element, state, mask=there)


@triton.jit
def lightning_carry(
    x, before, out, initial, log_decay, segments, tiles, heads, batches, scale, x_b, x_t, x_h, x_d, o_b, o_t, o_h, s_d, s_v,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    SHARING: tl.constexpr, REVERSE: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = before + scale · λ^distance x·M over a tile of columns of one segment and head, M being the state that enters."""
    segment, batch, head, tile = program(segments, tiles, heads, batches)
    first, stop = tl.load(segment), tl.load(segment + 1)
    rows = (stop - first).to(tl.int32)
    state_head, pairs = head // SHARING, batches * (heads // SHARING)
    pair = batch * (heads // SHARING) + state_head
    _, rate2 = rate_of(log_decay, state_head)
    p, d, dv = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tile * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * x_h + first * x_t
    before += batch * o_b + head * o_h + first * o_t
    out += batch * o_b + head * o_h + first * o_t
    state = load_state(initial, tl.load(segment + 4), pair, pairs, d, dv, s_d, s_v, D, DV) * scale
    state = state.to(x.dtype.element_ty)
    for start in tl.range(0, rows, ROWS):
        if REVERSE:
            distance = tl.load(segment + 3) - 1 - first - start - p
        else:
            distance = first - tl.load(segment + 2) + start + p + 1
        x_rows = load_chunk(x, start, rows, d, x_t, x_d, ROWS, D, BLOCK_D)
        weights = tl.exp2(rate2 * tl.maximum(distance, 0).to(tl.float32))
        acc = tl.dot(x_rows, state, input_precision=PRECISION) * weights[:, None]
        if ADD:
            acc += load_chunk(before, start, rows, dv, o_t, 1, ROWS, DV, BLOCK_DV)
        store_chunk(out, acc, start, rows, dv, o_t, ROWS, DV, BLOCK_DV)


def states(
    x: Tensor, y: Tensor, plan: Plan, config: configs.Config, *, log_decay: Tensor, scale: float, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(slots, B, Hkv, D, Dv), the state before each segment, and (leaving, B, Hkv, D, Dv), that of each span; all from zero.

    The state of some rows is Σ_j λ^n xᵀ_j y_j, with n rows after j; `reverse`, it is scale · Σ_i λ^n x_iᵀ y_i with i and the
    rows before it. x is (B, T, H, D), y (B, T, H, Dv); H is a multiple of the Hkv heads of log_decay (Hkv,) fp64.
    """
    (x, y), dim, value_dim = configs.addressable(x, y), x.shape[-1], y.shape[-1]
    batch, heads, size = x.shape[0], log_decay.shape[0], dim * value_dim
    between = x.new_empty((plan.lengths.numel(), batch, heads, dim, value_dim), dtype=configs.STATE)
    final = x.new_empty((plan.leaving, *between.shape[1:]), dtype=configs.STATE)
    flags = configs.constants(config, x.dtype) | {
        "D": dim, "DV": value_dim, "BLOCK_D": config.tile(dim), "BLOCK_DV": config.tile(value_dim),
        "MEMBERS": x.shape[2] // heads, "REVERSE": reverse,
    }  # fmt: skip
    tiles = triton.cdiv(dim, flags["BLOCK_D"]) * triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = [x, y, between, log_decay, plan.summed, tiles, heads, batch, scale, *x.stride(), *y.stride()]
    configs.launch(lightning_states, plan.summed, tiles * heads * batch, config, arguments, flags)
    blocks = triton.cdiv(size, configs.SCAN_BLOCK)
    arguments = [between, final, log_decay, plan.chains, plan.lengths, blocks, heads, batch * heads, size]
    flags = {"BLOCK": configs.SCAN_BLOCK, "REVERSE": reverse}
    configs.launch(lightning_scan, plan.chains, blocks * batch * heads, configs.SCAN, arguments, flags)
    return between, final


def carry(
    x: Tensor,
    plan: Plan,
    config: configs.Config,
    *,
    before: Tensor | None,
    out: Tensor,
    initial: Tensor,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
) -> None:
    """Write before + scale · λ^n x_i · initial to out (B, T, H, Dv); n counts i and the span's rows before it.

    `reverse`: n counts the rows after i. x is (B, T, H, D); `initial` (n, B, Hkv, D, Dv) is contiguous or the transpose of
    what is. If `before`, laid out like `out`, is `out` itself, then only spans that a state enters are touched.
    """
    (x,), dim, value_dim = configs.addressable(x), x.shape[-1], out.shape[-1]
    flags = configs.constants(config, x.dtype) | {
        "D": dim, "DV": value_dim, "BLOCK_D": configs.padded(dim), "BLOCK_DV": config.tile(value_dim),
        "SHARING": x.shape[2] // initial.shape[2], "REVERSE": reverse, "ADD": before is not None,
    }  # fmt: skip
    segments, tiles = plan.carried if before is out else plan.segments, triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = [
        x, out if before is None else before, out, initial, log_decay, segments, tiles, x.shape[2], x.shape[0], scale,
        *x.stride(), *out.stride()[:3], *initial.stride()[-2:],
    ]  # fmt: skip
    configs.launch(lightning_carry, segments, tiles * x.shape[2] * x.shape[0], config, arguments, flags)
