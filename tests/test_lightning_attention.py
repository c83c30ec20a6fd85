"""Lightning attention's kernels against their reference, through the backend that arranges them, as the flash kernels are.

On a CPU in Triton's interpreter (fp32, fp16), on a GPU in bf16 too. What the kernels are given uninitialised is NaN.
"""

import dataclasses
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqpar.kernels import lightning_attention as kernels
from seqpar.kernels.lightning_attention import reference

from seqpar.backends.linear import fused
from tests.cases import TRITON_REFUSES, stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALL = kernels.Config(16, 16, 4, 1)
SHIPPED = [None] * torch.cuda.is_available()  # the table's configurations, whose tiles are large for an interpreter


def poisoned(x, *shape, made=torch.Tensor.new_empty, **options):
    new = made(x, *shape, **options)
    return new.fill_(math.nan) if new.is_floating_point() else new


@contextmanager
def arranged(rows, config):
    """Segments have so many rows, kernels this configuration, or the table's if it is None; new memory is NaN."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fused, "_segment_rows", lambda *_: rows)
        if config is not None:
            patched.setattr(fused.kernels, "choose", lambda *_: config)
        patched.setattr(torch.Tensor, "new_empty", poisoned)
        yield


@dataclasses.dataclass
class Spans:
    """Spans written by hand."""

    edges: np.ndarray
    enter: np.ndarray
    leave: np.ndarray
    lowered: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, lengths, enter=None, leave=None):
        """`enter` and `leave` say whether a state does; the states are numbered from the last span to the first."""

        def numbered(does):
            does = np.array([False] * len(lengths) if does is None else does, dtype=bool)
            return np.where(does, does[::-1].cumsum()[::-1] - 1, -1)

        return cls(np.cumsum([0, *lengths]), numbered(enter), numbered(leave))


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """As seqpar.linear's."""

    scale: float
    causal: bool
    backend: str
    log_decay: torch.Tensor | None


@dataclasses.dataclass
class Operands:
    """Random inputs (B, T, H, D), states (n, B, H, D, Dv) and upstream gradients of both."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    initial: torch.Tensor | None
    dfinal: torch.Tensor | None
    log_decay: torch.Tensor | None
    scale: float

    @classmethod
    def draw(cls, spans, dtype=torch.float32, batch=1, heads=(1, 1), dims=(16, 16), *, seed=0, decay=(-0.1, -0.01), scale=0.25,
             layout="bthd"):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, dtype=dtype):
            return stored(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE), layout)

        def states(index):
            count = int((index >= 0).sum())
            return draw(count, batch, heads[1], *dims, dtype=torch.float32) if count else None

        rows, (dim, value_dim) = int(spans.edges[-1]), dims
        log_decay = None if decay is None else torch.tensor(decay, dtype=torch.float64, device=DEVICE)[: heads[1]]
        return cls(
            draw(batch, rows, heads[0], dim), draw(batch, rows, heads[1], dim), draw(batch, rows, heads[1], value_dim),
            draw(batch, rows, heads[0], value_dim), states(spans.enter), states(spans.leave), log_decay, scale,
        )  # fmt: skip

    def expected(self, spans):
        """out, states, dq, dk, dv and the gradient of the states, of the reference in fp64; all from the span's own rows."""
        q, k, v = (x.double().cpu().requires_grad_() for x in (self.q, self.k, self.v))
        decay = None if self.log_decay is None else self.log_decay.cpu()
        shape = spans.enter.size, q.shape[0], k.shape[2], q.shape[3], v.shape[3]
        entering, after = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        for tensor, index, states in ((entering, spans.enter, self.initial), (after, spans.leave, self.dfinal)):
            for span in np.flatnonzero(index >= 0):
                tensor[span] = states[index[span]]
        entering.requires_grad_()
        out, final = reference.attention(q, k, v, spans.edges.tolist(), list(entering), decay, self.scale)
        _, own = reference.attention(q, k, v, spans.edges.tolist(), [None] * spans.enter.size, decay, self.scale)
        loss = (out * self.dout.double().cpu()).sum() + 0 * sum(x.sum() for x in (q, k, v, entering))  # if there are no rows
        (dentering,) = torch.autograd.grad(loss, entering, retain_graph=True)
        gradients = torch.autograd.grad(loss + (torch.stack(final) * after).sum(), (q, k, v))
        ordered = [x[np.argsort(i, kind="stable")[i.size - (i >= 0).sum() :]] for x, i in
                   ((torch.stack(own), spans.leave), (dentering, spans.enter))]  # fmt: skip
        return tuple(x.detach() for x in (out, ordered[0], *gradients, ordered[1]))

    def computed(self, spans, rows, config=SMALL, *, local=False, causal=True):
        """The kernels' answer, with segments of so many rows; with `local`, in two steps."""
        recurrence = Recurrence(self.scale, causal, "triton", self.log_decay)
        with arranged(rows, config):
            forward = fused.Forward(self.q, self.k, self.v, spans, recurrence)
            if local:
                forward.local()
            out = forward.finish(self.initial)
            backward = fused.Backward(self.q, self.k, self.v, self.dout, spans, recurrence, self.initial)
            if local:
                backward.local()
            gradients = backward.finish(self.dfinal)
        assert out.dtype == self.q.dtype and all(x.dtype == torch.float32 for x in gradients)
        return out, forward.states, *gradients, backward.states


NAMES = ("out", "states", "dq", "dk", "dv", "dstates")


def assert_close(got, expected, dtype, names=NAMES):
    """RMS error within eight roundings of results of size one: the size of the terms that are summed."""
    for name, x, y in zip(names, got, expected, strict=True):
        assert x.shape == y.shape, name
        x = x.double().cpu()
        assert x.isfinite().all(), name
        error, size = rms(x - y), max(1.0, rms(y))
        assert error <= 8 * UNIT[dtype] * size, f"{name}: {error} where the size is {size}"


def rms(x):
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def equal(x, y):
    return all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@st.composite
def some_spans(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 16, 35]), min_size=1, max_size=3))
    enter, leave = (draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))) for _ in range(2))
    return Spans.of(lengths, enter, leave)


@settings(max_examples=8)
@given(
    spans=some_spans(),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([16, 32, 1000]),
    config=st.sampled_from([SMALL, kernels.Config(32, 16, 4, 1), *SHIPPED]),
    local=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "batch": st.sampled_from([1, 1, 2]),
            "heads": st.sampled_from([(1, 1), (2, 2), (2, 1)]),
            "dims": st.sampled_from([(16, 16), (5, 24), (20, 16)]),
            "seed": st.integers(0, 99),
            "decay": st.sampled_from([None, (0.0, -0.5), (-3.0, -0.1), (-0.1, -0.01)]),
            "scale": st.sampled_from([0.25, -0.4]),
            "layout": st.sampled_from(["bthd", "bhtd", "strided"]),
        }
    ),
)
def test_random_spans(spans, dtype, rows, config, local, options):
    x = Operands.draw(spans, dtype, **options)
    assert_close(x.computed(spans, rows, config, local=local), x.expected(spans), dtype)


def test_tables_cover_each_row_once():
    """Whatever the length of segments; those that are carried begin with a state, and slots follow the rows."""
    spans = Spans.of([5, 0, 40, 1, 70], [True, False, False, True, True], [False, True, True, False, False])
    for rows in (1, 16, 41, 1000):
        for reverse in (False, True):
            incoming, outgoing = (spans.leave, spans.enter) if reverse else (spans.enter, spans.leave)
            plan = kernels.cut(spans.edges, incoming, outgoing, rows, torch.device("cpu"), reverse)
            count, slots = np.zeros(spans.edges[-1], int), {}
            for first, stop, start, end, entered, slot in plan.segments.tolist():
                count[first:stop] += 1
                span = int(np.searchsorted(spans.edges, first, side="right")) - 1
                assert (start, end, entered) == (*spans.edges[span : span + 2], incoming[span]) and 0 < stop - first <= rows
                assert ([first, stop, start, end, entered, slot] in plan.carried.tolist()) == (entered >= 0)
                needed = (first > start if reverse else stop < end) or outgoing[span] >= 0
                assert ([first, stop, start, end, entered, slot] in plan.summed.tolist()) == needed
                slots[slot] = (first, stop)
            assert (count == 1).all()
            ordered = [slots[slot] for slot in sorted(slots) if slot >= 0]
            assert ordered == sorted(ordered) and [b - a for a, b in ordered] == plan.lengths.tolist()
            assert plan.leaving == (outgoing >= 0).sum() and sorted(x for *_, x in plan.chains.tolist() if x >= 0) == list(
                range(plan.leaving)
            )


@pytest.mark.parametrize(("tokens", "wanted"), [(0, 1), (5, 264), (10_000, 3), (2**20, 132), (2**20, 1)])
def test_segments_fill_a_device(tokens, wanted):
    rows = kernels.segment_rows(tokens, wanted)
    assert rows >= 512 and rows % 64 == 0 and -(-tokens // rows) <= wanted
    assert rows == 512 or rows < tokens / wanted + 64


def test_the_length_of_segments_does_not_matter():
    spans = Spans.of([60, 20], [True, False], [True, True])
    x = Operands.draw(spans)
    expected = x.expected(spans)
    for rows in (16, 48, 1000):
        assert_close(x.computed(spans, rows), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_two_steps(dtype):
    """What enters a span is added to what was computed without it, and rounded with it, once."""
    spans = Spans.of([20, 17], [True, False], [False, True])
    x = Operands.draw(spans, dtype, heads=(4, 2))
    assert_close(x.computed(spans, 32, local=True), x.expected(spans), dtype)


def test_contraction_in_parts():
    """Of a dim of 40, 16 at a time."""
    spans = Spans.of([35], [True], [True])
    x = Operands.draw(spans, dims=(40, 20))
    assert_close(x.computed(spans, 32, dataclasses.replace(SMALL, depth=16)), x.expected(spans), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_causal(dtype):
    """Every row sees the sum of its run, wherever the rest of the run is: its states are sums, and so are their gradients."""
    spans = Spans.of([20, 33], [True, True], [True, True])
    x = Operands.draw(spans, dtype, heads=(4, 2), dims=(16, 20))
    got = x.computed(spans, 32, causal=False)
    q, k, v, dout = (y.double().cpu().unflatten(2, (2, -1)) for y in (x.q, x.k, x.v, x.dout))
    complete, gradient = x.initial.double().cpu(), x.dfinal.double().cpu()
    parts = slice(20), slice(20, 53)
    expected = [[] for _ in NAMES]
    for i in range(2):
        rows, m, dm = parts[i], complete[spans.enter[i]], gradient[spans.leave[i]]
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
        expected[i] = torch.stack([expected[i][j] for j in np.argsort(spans.leave)])
    for i in (0, 2, 3, 4):
        expected[i] = torch.cat(expected[i], 1)
    assert_close(got, expected, dtype)


@pytest.mark.parametrize("dims", [(40, 72), (128, 96), (256, 256), (1, 3)])
def test_head_dims(dims):
    """The configurations of the table, whose tiles are cut where dims are large."""
    spans, dtype = Spans.of([33], [True], [True]), DTYPES[-1]
    x = Operands.draw(spans, dtype, dims=dims, scale=dims[0] ** -0.5)
    config = None if torch.cuda.is_available() else kernels.Config(32, 128, 4, 1)
    assert_close(x.computed(spans, 1000, config), x.expected(spans), dtype)


def test_a_token_changes_nothing_before_it():
    """Nor, in the gradients of keys and values, after it; and the first rows see something. Bit for bit."""
    spans = Spans.of([70])
    x = Operands.draw(spans)
    y = dataclasses.replace(x, **{name: getattr(x, name).clone() for name in ("q", "k", "v", "dout")})
    for name in ("q", "k", "v", "dout"):
        getattr(y, name)[:, 40] += 1
    for rows in (32, 1000):
        before, after = x.computed(spans, rows), y.computed(spans, rows)
        for i in (0, 2):
            assert torch.equal(before[i][:, :40], after[i][:, :40]) and not torch.equal(before[i][:, 40:], after[i][:, 40:])
        for i in (3, 4):
            assert torch.equal(before[i][:, 41:], after[i][:, 41:]) and not torch.equal(before[i][:, :41], after[i][:, :41])
        assert (before[0][:, :16] != 0).all()


def test_garbage_in_another_document_does_not_leak():
    """NaN in the rows of neighbours, on both sides, reaches neither results nor gradients."""
    spans, alone = Spans.of([19, 21, 18]), Spans.of([21])
    x = Operands.draw(spans)
    for name in ("q", "k", "v", "dout"):
        getattr(x, name)[:, :19] = torch.nan
        getattr(x, name)[:, 40:] = torch.nan
    y = dataclasses.replace(x, **{name: getattr(x, name)[:, 19:40] for name in ("q", "k", "v", "dout")})
    got, expected = x.computed(spans, 16), y.computed(alone, 16)
    for i in (0, 2, 3, 4):
        assert torch.equal(got[i][:, 19:40], expected[i])  # the bits that the document has alone


def test_a_hundred_thousand_tokens():
    """λ^rows, rounded to fp32 and multiplied by itself from chunk to chunk, would be off always the same way.

    Of n chunks the other roundings, whichever way, leave about √(2n / 3): a multiplication and an addition for each, uniform
    within half a unit. All terms are positive, and the average over an output's dims lies closer than that.
    """
    tokens, rows = 100_000, 1024 if DEVICE.type == "cpu" else 64
    power = np.exp(-np.linspace(1e-5, 2e-5, 1000) * rows)
    error = power.astype(np.float32) / power - 1
    log_decay = float(np.log(power[np.argmax(error)]) / rows)  # that which fp32 has worst
    spans = Spans.of([tokens], leave=[True])
    x = Operands.draw(spans, decay=(log_decay,), scale=1.0)
    x = dataclasses.replace(x, **{name: getattr(x, name).abs() for name in "qkv"})
    recurrence = Recurrence(1.0, True, "triton", x.log_decay)
    q, k, v = (y[0, :, 0].double().cpu() for y in (x.q, x.k, x.v))

    def state(row):
        weights = torch.exp(log_decay * torch.arange(row, -1, -1, dtype=torch.float64))
        return (k[: row + 1] * weights[:, None]).T @ v[: row + 1]

    def assert_close(got, expected, steps):
        error, bound = got.double().cpu() / expected - 1, math.sqrt(2 / 3 * steps + 4) * UNIT[torch.float32]
        assert error.abs().max() <= 4 * bound and error.mean().abs() <= bound

    with arranged(tokens, kernels.Config(rows, 16, 4, 1)):
        out = fused.Forward(x.q, x.k, x.v, spans, recurrence).finish(None)
    for row in (0, 1000, 54_321, 99_999):
        assert_close(out[0, row, 0], q[row] @ state(row), row // rows)
    with arranged(2 * rows, kernels.Config(2 * rows, 16, 4, 1)):
        final = fused.Forward(x.q, x.k, x.v, spans, recurrence).states
    assert_close(final[0, 0, 0], state(tokens - 1), tokens // (2 * rows))


@pytest.mark.parametrize("tokens", [[], [0], [0, 5]])
def test_empty_spans(tokens):
    """Their states are zero, and what enters them gets no gradient from them."""
    spans = Spans.of(tokens, [True] * len(tokens), [True] * len(tokens))
    x = Operands.draw(spans)
    got = x.computed(spans, 16)
    assert all(y.isfinite().all() for y in got)
    for i, index in ((1, spans.leave), (5, spans.enter)):
        assert (got[i][index[np.diff(spans.edges) == 0]] == 0).all()


@pytest.mark.parametrize("stride", [2**22, 2**26])
def test_offsets_past_2_to_the_31(stride):
    """Rows so far apart that the last lies beyond 2**31 elements. (Of the memory only what is touched is real.)"""
    n = 2**31 // stride + 8
    spans = Spans.of([n])
    x = Operands.draw(spans, torch.float16)
    y = dataclasses.replace(x)
    for name in ("q", "k", "v", "dout"):
        dense = getattr(x, name)
        storage = torch.empty((n - 1) * stride + dense[0, 0].numel(), dtype=torch.float16, device=DEVICE)
        strided = storage.as_strided(dense.shape, (0, stride, *dense.stride()[2:]))
        setattr(y, name, strided.copy_(dense))
    config = kernels.Config(128, 16, 4, 1)
    assert equal(x.computed(spans, 300, config), y.computed(spans, 300, config))


def test_the_same_bits_again():
    spans = Spans.of([20], [True], [True])
    x = Operands.draw(spans)
    assert equal(x.computed(spans, 16), x.computed(spans, 16))


@pytest.mark.parametrize(("dtype", "dims", "interpret", "words"), [*TRITON_REFUSES, (torch.float32, (8, 8), True, None)])
def test_what_it_cannot_do_is_refused(monkeypatch, dtype, dims, interpret, words):
    monkeypatch.setattr(fused.fused.triton.knobs.runtime, "interpret", interpret)
    q, v = torch.zeros(1, 4, 1, dims[0], dtype=dtype), torch.zeros(1, 4, 1, dims[1], dtype=dtype)
    message = fused.refusal(q, q, v)
    assert message is None if words is None else words in message
