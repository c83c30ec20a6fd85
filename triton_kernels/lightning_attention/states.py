"""The states of segments and spans, and what a state that enters a span adds to the results of its
rows.

Qin et al., "Lightning Attention-2" (2024), section 3.2, carries one state KV through a sequence,
block by block. Here the states of all segments are first computed in parallel, each from zero. A
scan then joins them, span by span, to the state before each segment. `tables.py` defines segments,
spans and slots.

Sizes: B batch, T rows, H heads, Hkv heads of states, D and DV (Dv) the two head dims of a state.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim. Operands: x, y; o is out. s_d and s_v are the states' strides along D and DV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import DTYPES, check_rows
from ..specialisation import kernel
from .arguments import Walk, call_key, check_decay
from .configs import SCAN, SCAN_BLOCK, STATE, Config, constants, padded
from .launching import Call, launches, must_copy, ready, run, strides
from .tables import (
    CHAIN_WIDTH,
    INCOMING,
    OUTGOING,
    ROW_START,
    ROW_STOP,
    SLOT,
    SLOT_START,
    SLOT_STOP,
    SPAN_START,
    SPAN_STOP,
    SegmentTables,
)
from .tiles import load_chunk, load_state, power, program, rate_of, store_chunk


@kernel
def lightning_states(
    x, y, states, log_decay, scale, segments, blocks, heads, batches,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, MEMBERS: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a block (BLOCK_D, BLOCK_DV) of one segment's state from zero.

    The states are (slots, B, Hkv, D, DV); a program computes one head, and sums MEMBERS heads of x
    and y. Every row has its own weight, so the sum itself is never multiplied. For shapes see
    `states`.
    """
    segment, batch, head, block = program(segments, blocks, heads, batches)
    first, across = tl.load(segment + ROW_START), (DV + BLOCK_DV - 1) // BLOCK_DV
    rows = (tl.load(segment + ROW_STOP) - first).to(tl.int32)
    _, rate2 = rate_of(log_decay, head)
    p = tl.arange(0, CHUNK_ROWS)
    d = block // across * BLOCK_D + tl.arange(0, BLOCK_D)
    dv = block % across * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * MEMBERS * x_h + first * x_t
    y += batch * y_b + head * MEMBERS * y_h + first * y_t
    state = tl.zeros([BLOCK_D, BLOCK_DV], tl.float32)
    for member in range(MEMBERS):
        for start in tl.range(0, rows, CHUNK_ROWS):
            x_head = x + member * x_h
            x_rows = load_chunk(x_head, start, rows, d, x_t, x_d, CHUNK_ROWS, D, BLOCK_D)
            y_head = y + member * y_h
            y_rows = load_chunk(y_head, start, rows, dv, y_t, y_d, CHUNK_ROWS, DV, BLOCK_DV)
            if REVERSE:
                distance = start + p + 1
            else:
                distance = rows - 1 - start - p
            weights = tl.exp2(rate2 * tl.maximum(distance, 0)) * scale
            x_columns = x_rows.T
            weighted = (y_rows * weights[:, None]).to(y_rows.dtype)
            state = tl.dot(x_columns, weighted, state, input_precision=PRECISION)
    at = states + ((tl.load(segment + SLOT) * batches + batch) * heads + head) * D * DV
    mask = (d < D)[:, None] & (dv < DV)[None, :]
    tl.store(at + d[:, None] * DV + dv[None, :], state, mask=mask)


@kernel
def lightning_scan(
    states, final, log_decay, chains, lengths, blocks, heads, pairs, size,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace segments' states from zero by the states before them.

    A program replaces BLOCK elements of one span, batch and head. states is (slots, pairs, size),
    with `pairs` of batch and head, and `size` the elements of a state. If the span's own state
    leaves, it goes to final (leaving, pairs, size). `lengths` (slots,) are the rows of segments.
    """
    pid = tl.program_id(0)
    chain = chains + pid // (blocks * pairs) * CHAIN_WIDTH
    pair = (pid // blocks % pairs).to(tl.int64)
    first, stop = tl.load(chain + SLOT_START), tl.load(chain + SLOT_STOP)
    outgoing = tl.load(chain + OUTGOING)
    element = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    in_state = element < size
    rate, _ = rate_of(log_decay, pair % heads)
    state = tl.zeros([BLOCK], tl.float32)
    for step in range((stop - first).to(tl.int32)):
        if REVERSE:
            slot = stop - 1 - step
        else:
            slot = first + step
        at = states + (slot * pairs + pair) * size + element
        # Uninitialised, and not used, if it is the span's last and the span's state does not leave.
        segment_state = tl.load(at, mask=in_state, other=0.0)
        tl.store(at, state, mask=in_state)
        nearest, rest = power(rate, tl.load(lengths + slot))
        state = state * nearest + state * rest + segment_state
    if outgoing >= 0:
        at = final + (outgoing * pairs + pair) * size + element
        tl.store(at, state, mask=in_state)


@kernel
def lightning_carry(
    x, before, out, initial, log_decay, scale, segments, blocks, heads, batches,
    x_b, x_t, x_h, x_d, o_b, o_t, o_h, s_d, s_v,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, SHARING: tl.constexpr, REVERSE: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out = before + scale · λ^n x·M for BLOCK_DV dims of one segment and head.

    M is the state that enters the segment's span. n counts rows as in `carry`, which also has the
    shapes. Without ADD, `before` is 0.
    """
    segment, batch, head, block = program(segments, blocks, heads, batches)
    first, stop = tl.load(segment + ROW_START), tl.load(segment + ROW_STOP)
    rows = (stop - first).to(tl.int32)
    state_head, pairs = head // SHARING, batches * (heads // SHARING)
    pair = batch * (heads // SHARING) + state_head
    _, rate2 = rate_of(log_decay, state_head)
    p, d = tl.arange(0, CHUNK_ROWS), tl.arange(0, BLOCK_D)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * x_h + first * x_t
    before += batch * o_b + head * o_h + first * o_t
    out += batch * o_b + head * o_h + first * o_t
    incoming = tl.load(segment + INCOMING)
    state = load_state(initial, incoming, pair, pairs, d, dv, s_d, s_v, D, DV) * scale
    if x.dtype.element_ty == tl.float16:
        # The state of many rows exceeds the range of fp16, so its columns are scaled to fit. In
        # fp32, as in `lightning_recurrence`, it would not fit the shared memory.
        size = tl.maximum(tl.max(tl.abs(state), 0), 1e-30)[None, :] / 32768
        state /= size
    state = state.to(x.dtype.element_ty)
    for start in tl.range(0, rows, CHUNK_ROWS):
        if REVERSE:
            distance = tl.load(segment + SPAN_STOP) - 1 - first - start - p
        else:
            distance = first - tl.load(segment + SPAN_START) + start + p + 1
        x_rows = load_chunk(x, start, rows, d, x_t, x_d, CHUNK_ROWS, D, BLOCK_D)
        weights = tl.exp2(rate2 * tl.maximum(distance, 0).to(tl.float32))
        acc = tl.dot(x_rows, state, input_precision=PRECISION) * weights[:, None]
        if x.dtype.element_ty == tl.float16:
            acc *= size
        if ADD:
            acc += load_chunk(before, start, rows, dv, o_t, 1, CHUNK_ROWS, DV, BLOCK_DV)
        store_chunk(out, acc, start, rows, dv, o_t, CHUNK_ROWS, DV, BLOCK_DV)


def states(
    x: Tensor,
    y: Tensor,
    tables: SegmentTables,
    config: Config,
    *,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
    known_by: object = None,
) -> tuple[Tensor, Tensor]:
    """Return the state before each segment, and the state of each span whose state leaves.

    States start from zero. They are (slots, B, Hkv, D, Dv) and (leaving, B, Hkv, D, Dv), fp32. x is
    (B, T, H, D) and y (B, T, H, Dv). H is a multiple of Hkv, the heads of log_decay (Hkv,) fp64.

    The state of some rows is Σ_j λ^n xᵀ_j y_j, where n is the number of rows after j. With
    `reverse`, it is scale · Σ_i λ^n x_iᵀ y_i, where n is the number of rows up to and including i.
    For `known_by` see `recurrence`.
    """
    walk = Walk(tables, config, reverse)
    key = "states", call_key(known_by, walk, scale, x, y, log_decay)
    call: Call | None = tables.prepared.get(key)
    if call is None:
        call = tables.prepared[key] = _prepare_states(walk, x, y, log_decay)
    shape = x.shape[0], log_decay.shape[0], x.shape[-1], y.shape[-1]
    between = x.new_empty((tables.lengths.numel(), *shape), dtype=STATE)
    final = x.new_empty((tables.leaving, *shape), dtype=STATE)
    x, y = ready((x, y), call.copies)
    for launch in call.launches:
        if launch.kernel is lightning_states:
            run(launch, x, y, between, log_decay, float(scale))
        else:
            run(launch, between, final, log_decay)
    return between, final


def _prepare_states(walk: Walk, x: Tensor, y: Tensor, log_decay: Tensor) -> Call:
    tables, config, reverse = walk
    shapes = check_decay(log_decay)
    shapes.check("x", x, "B T H D", DTYPES)
    shapes.check("y", y, "B T H V", DTYPES)
    shapes.check_shared("x", "H", "G")
    batch, heads, (dim, value_dim) = x.shape[0], log_decay.shape[0], (x.shape[-1], y.shape[-1])
    members, size = x.shape[2] // heads, dim * value_dim
    copies = must_copy(x, y, members=members)
    x, y = ready((x, y), copies)
    flags = constants(config, x.dtype) | {
        "D": dim, "BLOCK_D": config.block(dim),
        "DV": value_dim, "BLOCK_DV": config.block(value_dim),
        "MEMBERS": members, "REVERSE": reverse,
    }  # fmt: skip
    blocks = triton.cdiv(dim, flags["BLOCK_D"]) * triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = tables.summed, blocks, heads, batch, *strides(x, 4), *strides(y, 4)
    programs = blocks * heads * batch
    summing = launches(lightning_states, tables.summed, programs, config, arguments, flags)
    blocks, pairs = triton.cdiv(size, SCAN_BLOCK), batch * heads
    arguments = tables.chains, tables.lengths, blocks, heads, pairs, size
    flags = {"BLOCK": SCAN_BLOCK, "REVERSE": reverse}
    joining = launches(lightning_scan, tables.chains, blocks * pairs, SCAN, arguments, flags)
    return Call(summing + joining, copies)


def carry(
    x: Tensor,
    tables: SegmentTables,
    config: Config,
    *,
    before: Tensor | None,
    out: Tensor,
    initial: Tensor,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
    known_by: object = None,
) -> None:
    """Write before + scale · λ^n x_i · initial to out (B, T, H, Dv).

    n is the number of the span's rows up to and including i. With `reverse`, n is the number of the
    span's rows after i. x is (B, T, H, D). `initial` (n, B, Hkv, D, Dv) is contiguous, or the
    transpose of a contiguous tensor. `before` has the strides of `out`. If `before` is `out`
    itself, only spans that a state enters change. For `known_by` see `recurrence`.
    """
    walk = Walk(tables, config, reverse)
    tensors = x, before, out, initial, log_decay
    key = "carry", before is out, call_key(known_by, walk, scale, *tensors)
    call: Call | None = tables.prepared.get(key)
    if call is None:
        call = tables.prepared[key] = _prepare_carry(walk, *tensors)
    (x,) = ready((x,), call.copies)
    for launch in call.launches:
        run(launch, x, out if before is None else before, out, initial, log_decay, float(scale))


def _prepare_carry(
    walk: Walk,
    x: Tensor,
    before: Tensor | None,
    out: Tensor,
    initial: Tensor,
    log_decay: Tensor,
) -> Call:
    tables, config, reverse = walk
    shapes = check_decay(log_decay)
    shapes.check("x", x, "B T H D", DTYPES)
    shapes.check("out", out, "B T H V")
    check_rows("out", out)
    shapes.check("initial", initial, "N B G D V", [torch.float32])
    if before is not None:
        shapes.check("before", before, "B T H V")
    shapes.check_shared("x", "H", "G")
    copies, dim, value_dim = must_copy(x), x.shape[-1], out.shape[-1]
    (x,) = ready((x,), copies)
    flags = constants(config, x.dtype) | {
        "D": dim, "BLOCK_D": padded(dim),
        "DV": value_dim, "BLOCK_DV": config.block(value_dim),
        "SHARING": x.shape[2] // initial.shape[2], "REVERSE": reverse, "ADD": before is not None,
    }  # fmt: skip
    segments = tables.carried if before is out else tables.segments
    batch, heads, blocks = x.shape[0], x.shape[2], triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = (
        segments, blocks, heads, batch,
        *strides(x, 4), *strides(out, 3), *initial.stride()[-2:],
    )  # fmt: skip
    programs = blocks * heads * batch
    return Call(launches(lightning_carry, segments, programs, config, arguments, flags), copies)
