"""Lightning attention's kernels against their reference.

They are called through the backend that arranges them, as the flash kernels are. On a CPU they run
in Triton's interpreter (fp32, fp16), on a GPU in bf16 too. What they are given uninitialised is
NaN.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
import triton
from hypothesis import settings
from seqpar.kernels import lightning_attention as kernels

from seqpar.linear.inputs import Inputs
from seqpar.linear.states.backends import triton as backend
from seqpar.linear.states.state_options import StateOptions
from tests.kernels.lightning_cases import (
    DEVICE,
    DTYPES,
    NAMES,
    SMALL,
    UNIT,
    Operands,
    arranged,
    assert_close,
    drawn,
    equal,
    spans_of,
)
from tests.kernels.operands import TRITON_REFUSES, far_apart


@settings(max_examples=6)
@drawn
def test_random_spans(spans, dtype, rows, config, local, options):
    x = Operands.draw(spans, dtype, **options)
    assert_close(x.computed(spans, rows, config, local=local), x.expected(spans), dtype)


@pytest.mark.exhaustive
@settings(max_examples=16)
@drawn
def test_more_random_spans(spans, dtype, rows, config, local, options):
    x = Operands.draw(spans, dtype, **options)
    assert_close(x.computed(spans, rows, config, local=local), x.expected(spans), dtype)


def test_tables_cover_each_row_once():
    """Whatever the length of segments.

    Those that are carried begin with a state, and slots follow the rows.
    """
    spans = spans_of(
        [5, 0, 40, 1, 70], [True, False, False, True, True], [False, True, True, False, False]
    )
    for rows in (1, 16, 41, 1000):
        for reverse in (False, True):
            incoming, outgoing = (
                (spans.state_out, spans.state_in) if reverse else (spans.state_in, spans.state_out)
            )
            tables = kernels.segment_tables(
                spans.edges, incoming, outgoing, rows, torch.device("cpu"), reverse
            )
            count, slots = np.zeros(spans.edges[-1], int), {}
            for first, stop, start, end, entered, slot in tables.segments.tolist():
                count[first:stop] += 1
                span = int(np.searchsorted(spans.edges, first, side="right")) - 1
                assert (start, end, entered) == (
                    *spans.edges[span : span + 2],
                    incoming[span],
                ) and 0 < stop - first <= rows
                assert ([first, stop, start, end, entered, slot] in tables.carried.tolist()) == (
                    entered >= 0
                )
                needed = (first > start if reverse else stop < end) or outgoing[span] >= 0
                assert (
                    [first, stop, start, end, entered, slot] in tables.summed.tolist()
                ) == needed
                slots[slot] = (first, stop)
            assert (count == 1).all()
            ordered = [slots[slot] for slot in sorted(slots) if slot >= 0]
            assert (
                ordered == sorted(ordered)
                and [b - a for a, b in ordered] == tables.lengths.tolist()
            )
            assert tables.leaving == (outgoing >= 0).sum() and sorted(
                x for *_, x in tables.chains.tolist() if x >= 0
            ) == list(range(tables.leaving))


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, 1), (5, 264), (10_000, 3), (2**20, 132), (2**20, 1)]
)
def test_segments_fill_a_device(tokens, wanted):
    rows = kernels.segment_length(tokens, wanted)
    assert rows >= 512 and rows % 64 == 0 and -(-tokens // rows) <= wanted
    assert rows == 512 or rows < tokens / wanted + 64


def test_the_length_of_segments_does_not_matter():
    spans = spans_of([60, 20], [True, False], [True, True])
    x = Operands.draw(spans)
    expected = x.expected(spans)
    for rows in (16, 48, 1000):
        assert_close(x.computed(spans, rows), expected, torch.float32)


def test_each_call_has_its_own_scale():
    spans = spans_of([20, 17], [True, False], [False, True])
    x = Operands.draw(spans)
    for scale in (0.25, -0.4):
        x = dataclasses.replace(x, scale=scale)
        for local in (False, True):
            assert_close(x.computed(spans, 16, local=local), x.expected(spans), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_two_steps(dtype):
    """What enters a span is added to what was computed without it, and rounded with it, once."""
    spans = spans_of([20, 17], [True, False], [False, True])
    x = Operands.draw(spans, dtype, heads=(4, 2))
    assert_close(x.computed(spans, 32, local=True), x.expected(spans), dtype)


def test_contraction_in_parts():
    """Of a dim of 40, 16 at a time."""
    spans = spans_of([35], [True], [True])
    x = Operands.draw(spans, dims=(40, 20))
    assert_close(
        x.computed(spans, 32, dataclasses.replace(SMALL, depth=16)),
        x.expected(spans),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_causal(dtype):
    """Every row sees the sum of its run, wherever the rest of the run is.

    Its states are sums, and so are their gradients.
    """
    spans = spans_of([20, 33], [True, True], [True, True])
    x = Operands.draw(spans, dtype, heads=(4, 2), dims=(16, 20))
    got = x.computed(spans, 32, causal=False)
    q, k, v, dout = (y.double().cpu().unflatten(2, (2, -1)) for y in (x.q, x.k, x.v, x.dout))
    complete, gradient = x.initial.double().cpu(), x.dfinal.double().cpu()
    parts = slice(20), slice(20, 53)
    expected = [[] for _ in NAMES]
    for i in range(2):
        rows, m, dm = parts[i], complete[spans.state_in[i]], gradient[spans.state_out[i]]
        values = (
            x.scale * torch.einsum("bthgd,bhde->bthge", q[:, rows], m).flatten(2, 3),
            torch.einsum("bthgd,bthge->bhde", k[:, rows], v[:, rows]),
            x.scale * torch.einsum("bthge,bhde->bthgd", dout[:, rows], m).flatten(2, 3),
            torch.einsum("bthge,bhde->bthgd", v[:, rows], dm).flatten(2, 3),
            torch.einsum("bthgd,bhde->bthge", k[:, rows], dm).flatten(2, 3),
            x.scale * torch.einsum("bthgd,bthge->bhde", q[:, rows], dout[:, rows]),
        )
        for found, value in zip(expected, values, strict=True):
            found.append(value)
    for i in (1, 5):
        expected[i] = torch.stack([expected[i][j] for j in np.argsort(spans.state_out)])
    for i in (0, 2, 3, 4):
        expected[i] = torch.cat(expected[i], 1)
    assert_close(got, expected, dtype)


def test_the_strongest_decay_forgets_earlier_rows():
    spans = spans_of([20, 5], [True, False], [True, True])
    x = Operands.draw(spans, decay=(torch.finfo(torch.float32).min,))
    for local in (False, True):
        assert_close(x.computed(spans, 16, local=local), x.expected(spans), torch.float32)


@pytest.mark.parametrize("local", [False, True])
def test_states_may_exceed_the_range_of_fp16(local):
    spans = spans_of([40], [True], [True])
    x = Operands.draw(spans, torch.float16)
    x = dataclasses.replace(x, q=x.q * 1e-3, initial=x.initial * 1e6, dfinal=x.dfinal * 1e6)
    got = x.computed(spans, 16, local=local)
    assert_close(got, x.expected(spans), torch.float16)


@pytest.mark.parametrize("dims", [(40, 72), (128, 96), (256, 256), (1, 3)])
def test_head_dims(dims):
    """The configurations of the table, whose tiles are cut where dims are large."""
    spans, dtype = spans_of([33], [True], [True]), DTYPES[-1]
    x = Operands.draw(spans, dtype, dims=dims, scale=dims[0] ** -0.5)
    config = None if torch.cuda.is_available() else kernels.Config(32, 128, 4, 1)
    assert_close(x.computed(spans, 1000, config), x.expected(spans), dtype)


def test_a_token_changes_nothing_before_it():
    """Nor, in the gradients of keys and values, after it; and the first rows see something.

    Bit for bit.
    """
    spans = spans_of([70])
    x = Operands.draw(spans)
    y = dataclasses.replace(
        x, **{name: getattr(x, name).clone() for name in ("q", "k", "v", "dout")}
    )
    for name in ("q", "k", "v", "dout"):
        getattr(y, name)[:, 40] += 1
    for rows in (32, 1000):
        before, after = x.computed(spans, rows), y.computed(spans, rows)
        for i in (0, 2):
            assert torch.equal(before[i][:, :40], after[i][:, :40]) and not torch.equal(
                before[i][:, 40:], after[i][:, 40:]
            )
        for i in (3, 4):
            assert torch.equal(before[i][:, 41:], after[i][:, 41:]) and not torch.equal(
                before[i][:, :41], after[i][:, :41]
            )
        assert (before[0][:, :16] != 0).all()


@pytest.mark.parametrize("tokens", [30_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_many_chunks_add_no_error(tokens):
    """λ^rows in fp32, multiplied by itself from chunk to chunk, would be off always the same way.

    Of n chunks the other roundings, whichever way, leave about √(2n / 3): a multiplication and an
    addition for each, uniform within half a unit. All terms are positive, and the average over an
    output's dims lies closer than that.
    """
    rows = 1024 if DEVICE.type == "cpu" else 64
    power = np.exp(-np.linspace(1e-5, 2e-5, 1000) * rows)
    error = power.astype(np.float32) / power - 1
    log_decay = float(np.log(power[np.argmax(error)]) / rows)  # that which fp32 has worst
    spans = spans_of([tokens], leave=[True])
    x = Operands.draw(spans, decay=(log_decay,), scale=1.0)
    x = dataclasses.replace(x, **{name: getattr(x, name).abs() for name in "qkv"})
    options = StateOptions(1.0, True, "triton", x.log_decay)
    q, k, v = (y[0, :, 0].double().cpu() for y in (x.q, x.k, x.v))

    def state(row):
        weights = torch.exp(log_decay * torch.arange(row, -1, -1, dtype=torch.float64))
        return (k[: row + 1] * weights[:, None]).T @ v[: row + 1]

    def assert_close(got, expected, steps):
        error = got.double().cpu() / expected - 1
        bound = math.sqrt(2 / 3 * steps + 4) * UNIT[torch.float32]
        assert error.abs().max() <= 4 * bound and error.mean().abs() <= bound

    with arranged(tokens, kernels.Config(rows, 16, 4, 1)):
        out = backend.Forward(Inputs(x.q, x.k, x.v), spans, options).finish(None)
    for row in (0, 1000, round(0.54321 * tokens), tokens - 1):
        assert_close(out[0, row, 0], q[row] @ state(row), row // rows)
    with arranged(2 * rows, kernels.Config(2 * rows, 16, 4, 1)):
        final = backend.Forward(Inputs(x.q, x.k, x.v), spans, options).outgoing
    assert_close(final[0, 0, 0], state(tokens - 1), tokens // (2 * rows))


@pytest.mark.parametrize("tokens", [[], [0], [0, 5]])
def test_empty_spans(tokens):
    """Their states are zero, and what enters them gets no gradient from them."""
    spans = spans_of(tokens, [True] * len(tokens), [True] * len(tokens))
    x = Operands.draw(spans)
    got = x.computed(spans, 16)
    assert all(y.isfinite().all() for y in got)
    for i, index in ((1, spans.state_out), (5, spans.state_in)):
        assert (got[i][index[np.diff(spans.edges) == 0]] == 0).all()


@pytest.mark.parametrize("stride", [2**22, 2**26])
def test_offsets_past_2_to_the_31(stride):
    """Rows so far apart that the last lies beyond 2**31 elements.

    Of the memory only what is touched is real.
    """
    n = 2**31 // stride + 8
    spans = spans_of([n])
    x = Operands.draw(spans, torch.float16)
    y = far_apart(x, stride)
    config = kernels.Config(128, 16, 4, 1)
    assert equal(x.computed(spans, 300, config), y.computed(spans, 300, config))


def test_offsets_of_heads_past_2_to_the_31():
    """Three query heads share a KV head; the last begins 2**31 elements after the first."""
    spans = spans_of([70, 20], [True, False], [False, True])
    x = Operands.draw(spans, torch.float16, heads=(3, 1))
    y = far_apart(x, 2**30, dim=2)
    assert equal(x.computed(spans, 32), y.computed(spans, 32))


def test_strided_decays_are_refused():
    """Kernels read them one after another."""
    spans = spans_of([20], [True], [True])
    x = Operands.draw(spans, heads=(2, 2))
    apart = torch.stack([x.log_decay, x.log_decay], 1)[:, 0]
    with pytest.raises(ValueError, match="log_decay must have contiguous rows"):
        dataclasses.replace(x, log_decay=apart).computed(spans, 16)


def test_the_same_bits_again():
    spans = spans_of([20], [True], [True])
    x = Operands.draw(spans)
    assert equal(x.computed(spans, 16), x.computed(spans, 16))


@pytest.mark.parametrize(
    ("dtype", "dims", "interpret", "words"), [*TRITON_REFUSES, (torch.float32, (8, 8), True, None)]
)
def test_what_it_cannot_do_is_refused(monkeypatch, dtype, dims, interpret, words):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    q, v = torch.zeros(1, 4, 1, dims[0], dtype=dtype), torch.zeros(1, 4, 1, dims[1], dtype=dtype)
    message = backend.refusal(q, v)
    assert message is None if words is None else words in message
