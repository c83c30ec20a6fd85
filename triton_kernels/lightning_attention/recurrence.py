"""Lightning attention over segments of spans, forward or from the end.

Qin et al., "Lightning Attention-2" (2024), section 3.2, algorithms 1 and 2, with segments in
parallel: the state before each segment comes from `states.py`. As in the paper, a segment is walked
in chunks (the paper's blocks). Within a chunk, the decay masks the products of rows with rows;
earlier rows enter as one product with the state. One kernel serves four purposes, since the
gradients of linear attention are linear attentions:

    out = (q, k, v)       dq = (dout, v, k), on transposed states
    dv = (k, q, dout)     dk = (v, dout, q), on transposed states; these two from the end

The contracted dim D can also be cut, since out is linear in it: the parts of D add to out one after
another.

Sizes: B batch, T rows, H heads, D the contracted head dim, DV (Dv) the head dim of the result.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim. Operands: x, y, z; o is out. s_d and s_v are the states' strides along D and DV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import DTYPES, check_rows
from ..specialisation import kernel
from .arguments import Walk, call_key, check_decay
from .configs import Config, constants, padded
from .launching import Call, launches, must_copy, ready, run, strides
from .tables import INCOMING, ROW_START, ROW_STOP, SLOT, SPAN_START, SPAN_STOP, SegmentTables
from .tiles import load_chunk, load_state, power, program, rate_of, store_chunk


@kernel
def lightning_recurrence(
    x, y, z, out, between, initial, log_decay, scale, state_scale, segments, blocks, heads, batches,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, z_b, z_t, z_h, z_d, o_b, o_t, o_h, s_d, s_v,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, SHARING: tl.constexpr, MEMBERS: tl.constexpr,
    REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, FROM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_DV dims of the result for one segment and head.

    This is the loop of algorithm 1, or with REVERSE of algorithm 2. It contracts BLOCK_D dims from
    `FROM` on, and adds them to out if `FROM` is not 0. `SHARING` heads have one state, which sums
    `MEMBERS` heads of y and z and is kept times the scale. Chunks begin at the start of the walk,
    so only the last one may lack rows; the state after it is never read. For shapes see
    `recurrence`.
    """
    segment, batch, head, block = program(segments, blocks, heads, batches)
    first, stop = tl.load(segment + ROW_START), tl.load(segment + ROW_STOP)
    rows = (stop - first).to(tl.int32)
    state_head, pairs = head // SHARING, batches * (heads // SHARING)
    pair = batch * (heads // SHARING) + state_head
    rate, rate2 = rate_of(log_decay, state_head)
    p, d = tl.arange(0, CHUNK_ROWS), FROM + tl.arange(0, BLOCK_D)
    dv = block * BLOCK_DV + tl.arange(0, BLOCK_DV)
    x += batch * x_b + head * x_h + first * x_t
    y += batch * y_b + state_head * MEMBERS * y_h + first * y_t
    z += batch * z_b + state_head * MEMBERS * z_h + first * z_t
    out += batch * o_b + head * o_h + first * o_t

    slot = tl.load(segment + SLOT)
    state = load_state(between, slot, pair, pairs, d, dv, s_d, s_v, D, DV)
    if HAS_INITIAL:
        if REVERSE:
            distance = tl.load(segment + SPAN_STOP) - stop
        else:
            distance = first - tl.load(segment + SPAN_START)
        nearest, rest = power(rate, distance)
        incoming = tl.load(segment + INCOMING)
        entering = load_state(initial, incoming, pair, pairs, d, dv, s_d, s_v, D, DV)
        state += entering * (nearest + rest)
    state *= state_scale

    before, after = tl.exp2(rate2 * (p + 1)), tl.exp2(rate2 * (CHUNK_ROWS - 1 - p))
    distance = p[:, None] - p[None, :]
    if REVERSE:
        before, after, distance = after, before, -distance
    decay = tl.where(distance >= 0, tl.exp2(rate2 * tl.maximum(distance, 0)) * scale, 0.0)
    after *= scale
    nearest, rest = power(rate, tl.full([], CHUNK_ROWS, tl.int32))
    for start in tl.range(0, rows, CHUNK_ROWS):
        if REVERSE:
            at = rows - CHUNK_ROWS - start
        else:
            at = start
        x_rows = load_chunk(x, at, rows, d, x_t, x_d, CHUNK_ROWS, D, BLOCK_D)
        if x_rows.dtype == tl.float16:  # whose range the state of many rows exceeds
            acc = tl.dot(x_rows.to(tl.float32), state, input_precision=PRECISION)
        else:
            acc = tl.dot(x_rows, state.to(x_rows.dtype), input_precision=PRECISION)
        acc *= before[:, None]
        state = state * nearest + state * rest
        for member in range(MEMBERS):
            y_head = y + member * y_h
            y_rows = load_chunk(y_head, at, rows, d, y_t, y_d, CHUNK_ROWS, D, BLOCK_D)
            z_head = z + member * z_h
            z_rows = load_chunk(z_head, at, rows, dv, z_t, z_d, CHUNK_ROWS, DV, BLOCK_DV)
            s = tl.dot(x_rows, y_rows.T, input_precision=PRECISION) * decay
            acc = tl.dot(s.to(z_rows.dtype), z_rows, acc, input_precision=PRECISION)
            weighted = (z_rows * after[:, None]).to(z_rows.dtype)
            state = tl.dot(y_rows.T, weighted, state, input_precision=PRECISION)
        if FROM > 0:
            acc += load_chunk(out, at, rows, dv, o_t, 1, CHUNK_ROWS, DV, BLOCK_DV)
        store_chunk(out, acc, at, rows, dv, o_t, CHUNK_ROWS, DV, BLOCK_DV)


def recurrence(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    tables: SegmentTables,
    config: Config,
    *,
    out: Tensor,
    between: Tensor,
    initial: Tensor | None,
    log_decay: Tensor,
    scale: float,
    reverse: bool,
    known_by: object = None,
) -> None:
    """Write scale · Σ_j λ^|i−j| (x_i·y_j) z_j to out (B, T, H, Dv) for each row i.

    The sum is over the rows j of the span up to i. With `reverse`, it is over the rows from i on.
    out is fp32 or has z's dtype. x is (B, T, H, D), y (B, T, Hy, D) and z (B, T, Hy, Dv). If Hy is
    smaller than H, heads of x share a head of y and z. If Hy is larger, the results of heads of y
    and z are summed.

    `between` (slots, B, Hkv, D, Dv) are the states before each segment, from `states`. `initial`
    (n, B, Hkv, D, Dv) are the states that enter spans. The forward walk multiplies states by the
    scale. For the walk from the end, the states already include the scale. `between` and `initial`
    are fp32, and contiguous or the transpose (`mT`) of a contiguous tensor. log_decay (Hkv,) is
    fp64.

    The tables keep the prepared call, and later calls reuse it. Without `known_by`, a later call
    needs the same arguments and the same signatures of tensors. With `known_by`, it needs the same
    `known_by` and the same alignments.
    """
    walk = Walk(tables, config, reverse)
    tensors = x, y, z, out, between, initial, log_decay
    key = "recurrence", call_key(known_by, walk, scale, *tensors)
    call: Call | None = tables.prepared.get(key)
    if call is None:
        _check(*tensors)
        call = _prepare(walk, x, y, z, out, between, has_initial=initial is not None)
        tables.prepared[key] = call
    operands = ready((x, y, z), call.copies)
    initial = between if initial is None else initial  # a valid address that is not used
    scale = float(scale)
    state_scale = 1.0 if reverse else scale
    for launch in call.launches:
        run(launch, *operands, out, between, initial, log_decay, scale, state_scale)


def _check(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    out: Tensor,
    between: Tensor,
    initial: Tensor | None,
    log_decay: Tensor,
) -> None:
    shapes = check_decay(log_decay)
    shapes.check("x", x, "B T H D", DTYPES)
    shapes.check("y", y, "B T Y D", DTYPES)
    shapes.check("z", z, "B T Y V", DTYPES)
    shapes.check_shared(*(("x", "H", "Y") if x.shape[2] > y.shape[2] else ("y", "Y", "H")))
    shapes.check("out", out, "B T H V")
    check_rows("out", out)
    shapes.check("between", between, "S B G D V", [torch.float32])
    if initial is not None:
        shapes.check("initial", initial, "N B G D V", [torch.float32])


def _prepare(
    walk: Walk, x: Tensor, y: Tensor, z: Tensor, out: Tensor, between: Tensor, *, has_initial: bool
) -> Call:
    tables, config, reverse = walk
    dim, value_dim, members = x.shape[-1], z.shape[-1], max(1, y.shape[2] // x.shape[2])
    copies = must_copy(x, y, z, members=members)
    x, y, z = ready((x, y, z), copies)
    flags = constants(config, x.dtype) | {
        "D": dim, "BLOCK_D": min(config.depth, padded(dim)),
        "DV": value_dim, "BLOCK_DV": config.block(value_dim),
        "SHARING": max(1, x.shape[2] // y.shape[2]), "MEMBERS": members,
        "REVERSE": reverse, "HAS_INITIAL": has_initial,
    }  # fmt: skip
    batch, heads, blocks = x.shape[0], x.shape[2], triton.cdiv(value_dim, flags["BLOCK_DV"])
    arguments = (
        tables.segments, blocks, heads, batch,
        *(stride for operand in (x, y, z) for stride in strides(operand, 4)),
        *strides(out, 3), *between.stride()[-2:],
    )  # fmt: skip
    common = lightning_recurrence, tables.segments, blocks * heads * batch, config, arguments
    parts = range(0, dim, flags["BLOCK_D"])
    return Call([x for at in parts for x in launches(*common, flags | {"FROM": at})], copies)
