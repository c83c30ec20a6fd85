"""The recurrent primitive against each token's formula in fp64: results, gradients and maps."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from seqpar import Layout, RecurrentAttention, use_backend
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import KINDS, kind
from seqpar.linear.maps.backends import aten
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import Maps, compose
from seqpar.linear.routes import SpanStates
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support.ranks import virtual
from tests.support.recurrent_calls import NAMES, RecurrentCall
from tests.support.recurrent_cases import RecurrentCase, errors, oracle, run
from tests.support.tiers import examples, few_rows

BACKENDS = ["aten", "reference"]
HEADS = [(2, 2, 2), (4, 2, 2), (1, 2, 4), (2, 4, 1), (6, 1, 3)]  # of q, k and v
STATES = [(None, None), ((1, 0, 1, 0), (0, 1, 1, 0)), ((0, 0, 0, 0), (0, 0, 0, 0))]
EXTREME = (0.0, -1e-9, -1e-3, -0.7, -30.0, -80.0, -1e4, -float("inf"))


def assert_exact(case, local=False):
    """A result has at most some 16 roundings a token in sequence, none of them enlarged."""
    expected, found = oracle(case), run(case, local)
    bound = 16 * max(1, case.edges[-1]) * torch.finfo(torch.float64).eps
    for name, y in expected.items():
        if y.numel():
            assert found[name].shape == y.shape and found[name].dtype == torch.float64
            error = (found[name] - y).abs().max() / y.abs().max().clamp_min(1e-3)
            assert error <= bound, (name, float(error))


@few_rows()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_fp64(kind, backend):
    for index, (q_heads, k_heads, v_heads) in enumerate(HEADS):
        entered, left = STATES[index % len(STATES)]
        case = RecurrentCase(
            kind, edges=(0, 10, 10, 11, 90), entered=entered, left=left, backend=backend, batch=1,
            q_heads=q_heads, k_heads=k_heads, v_heads=v_heads,
        )  # fmt: skip
        assert_exact(case, local=bool(index % 2))


@st.composite
def cases(draw):
    """Draw a call: spans of any lengths, shared heads, and decays and β at their limits."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 15, 16, 17, 33]), max_size=4))
    heads = draw(st.sampled_from([1, 2, 4]))
    shared = [draw(st.sampled_from([x for x in (1, 2, 4) if heads % x == 0])) for _ in range(2)]
    k_heads, v_heads = (heads, shared[0]) if draw(st.booleans()) else (shared[0], heads)
    flags = st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))
    written = [((0, 1), 1.0), ((0, 2), 1.0), ((2, 2), 1.0), ((0, 0.2), None), ((0, 0), 3.0)]
    beta, key_length = draw(st.sampled_from(written))
    return RecurrentCase(
        draw(st.sampled_from(list(KINDS))),
        edges=(0, *np.cumsum(lengths).tolist()),
        entered=tuple(draw(flags)),
        left=tuple(draw(flags)),
        batch=draw(st.integers(1, 2)),
        q_heads=draw(st.sampled_from([shared[1], heads, 3 * heads])),
        k_heads=k_heads,
        v_heads=v_heads,
        dim=draw(st.sampled_from([1, 4, 7])),
        value_dim=draw(st.sampled_from([1, 5])),
        log_decay=draw(st.sampled_from([-0.1, -5.0, EXTREME])),
        beta=beta,
        key_length=key_length,
        backend=draw(st.sampled_from(["aten", "aten", "aten", "reference"])),
        seed=draw(st.integers(0, 9)),
    )


@examples(15, 150)
@given(cases(), st.sampled_from([1, 4, 16]), st.booleans())
def test_any_spans_in_chunks_of_any_size(case, chunk, local):
    before, aten.CHUNK = aten.CHUNK, chunk
    try:
        assert_exact(case, local)
    finally:
        aten.CHUNK = before


@few_rows()
@pytest.mark.parametrize(
    "log_decay", [EXTREME, pytest.param(-0.01, marks=pytest.mark.exhaustive)], ids=["any", "near 1"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_within_twice_the_plain_recurrence(kind, log_decay):
    """And at most 1.1 times for results in bf16, whose last rounding is nearly all of it.

    Where the plain recurrence rounds once or twice, the bound is the rounding of a chunk's two
    products, each a sum of 64 terms: a sum of n terms of random signs, added one by one, has an RMS
    error of eps / sqrt(12) * sqrt(n / 2) beside its own RMS, 1.6 eps, and two such errors 2.3 eps.

    Keys have as many channels as a chunk has rows: of fewer the delta rule forgets nearly all of a
    state within a chunk, which is one subtraction, rounded to the digits of the state before it.
    """
    for dtype in (torch.float32, torch.bfloat16):
        case = RecurrentCase(
            kind, edges=(0, 140), dtype=dtype, dim=64, log_decay=log_decay, batch=1
        )
        expected, plain = oracle(case), run(dataclasses.replace(case, backend="reference"))
        found = run(case)
        bounds = errors(plain, expected)
        products = torch.finfo(torch.float32).eps * math.sqrt(2 * case.dim / 2 / 12)
        for name, error in errors(found, expected).items():
            factor = 1.1 if found[name].dtype == torch.bfloat16 else 2.0
            assert error <= max(factor * bounds[name], products), (dtype, name, error, bounds[name])


@few_rows()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_maps_compose_to_the_whole_in_any_grouping(name, backend):
    """Of a document in five spans, one of them empty: forward's maps, and backward's."""
    this, parts = kind(name), RecurrentCase(name, edges=(0, 1, 40, 40, 75, 77), backend=backend)
    whole = dataclasses.replace(parts, edges=(0, 77))
    found = {}
    for label, case in (("parts", parts), ("whole", whole)):
        inputs, dout, *_ = case.tensors()
        options = MapOptions(this, case.scale, backend)
        entering = begin_forward(inputs, case.spans, options).outgoing
        if label == "parts":
            one = [Maps(*(x[i : i + 1] for x in entering)) for i in range(5)]
            left = one[0]
            for later in one[1:]:
                left = compose(this, later, left)
            right = one[4]
            for earlier in reversed(one[:4]):
                right = compose(this, right, earlier)
            states = [torch.zeros_like(left.state[0])]
            for each in one[:4]:
                state = compose(this, each, Maps(each.transition, states[-1][None])).state[0]
                states.append(state)
            found["in one order"], found["in the other"] = left, right
            back = begin_backward(inputs, dout, case.spans, options, torch.stack(states)).outgoing
            one = [Maps(*(x[i : i + 1] for x in back)) for i in range(5)]
            left = one[4]
            for earlier in reversed(one[:4]):
                left = compose(this, earlier, left)
            found["back"] = left
        else:
            back = begin_backward(inputs, dout, case.spans, options, None).outgoing
    for label, expected in (("in one order", entering), ("in the other", entering), ("back", back)):
        for x, y in zip(found[label], expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, msg=label)


@pytest.mark.parametrize("name", ["gated_delta", "kda"])
def test_transitions_have_no_numbers_that_are_about_subnormal(name):
    """Products with these take a core many times as long."""
    edges = (0, 10, 310, 710, 1210, 1810, 1820)
    case = RecurrentCase(name, edges=edges, dtype=torch.float32, log_decay=-0.3)
    inputs, dout, entering, _ = case.tensors()
    how = case.spans, MapOptions(kind(name), case.scale, "aten")
    forward = begin_forward(inputs, *how)
    for work in (forward, begin_backward(inputs, dout, *how, entering)):
        sizes = work.outgoing.transition.abs()
        assert not ((sizes > 0) & (sizes < 1e-31)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_each_time(kind):
    case = RecurrentCase(kind, dtype=torch.float32)
    first, second = run(case), run(case)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", KINDS)
def test_a_nan_stays_in_its_span_after_it(name):
    case = RecurrentCase(name, edges=(0, 100, 300), entered=(0, 0), left=(1, 1), batch=1)
    inputs = case.tensors()[0]
    for x in inputs[:3]:
        x[:, 250] = float("nan")
    work = begin_forward(inputs, case.spans, MapOptions(kind(name), 1.0, "aten"))
    out = work.finish(None)
    assert out[:, : 100 + 128].isfinite().all() and work.outgoing.state[0].isfinite().all()
    assert out[:, 251:].isnan().all() and work.outgoing.state[1].isnan().all()


@few_rows()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_without_rows_or_spans_or_batch(name, backend):
    for edges, batch in (((0,), 2), ((0, 0, 0), 2), ((0, 5, 9), 0)):
        case = RecurrentCase(name, edges=edges, batch=batch, backend=backend)
        inputs, dout, entering, dleaving = case.tensors()
        options = MapOptions(kind(name), 1.0, backend)
        forward = begin_forward(inputs, case.spans, options)
        assert forward.finish(entering).shape == dout.shape
        assert forward.outgoing.state.shape == dleaving.shape
        backward = begin_backward(inputs, dout, case.spans, options, entering)
        found = backward.finish(dleaving)
        assert [x if x is None else x.shape for x in found] == [
            x if x is None else x.shape for x in inputs
        ]
        if batch and entering.numel():  # empty spans pass states on
            eye = torch.ones(()) if forward.outgoing.transition.dim() < 5 else torch.eye(case.dim)
            assert (forward.outgoing.transition == eye).all()


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("tokens", [25_000])
@pytest.mark.parametrize("name", ["gated_delta", "vector_decay"])
def test_fp32_errors_of_a_long_document(name, tokens):
    """They are at most twice the plain recurrence's; decays are near 1.

    A state forgets half in 14,000 tokens: over more than 25,000 the errors hardly grow. What is
    exact is the same backend in fp64, which other tests hold to the formula.
    """
    case = RecurrentCase(
        name, edges=(0, tokens), batch=1, q_heads=1, k_heads=1, v_heads=1, dim=4, value_dim=3,
        log_decay=-1e-4, beta=(0.0, 0.01), dtype=torch.float32,
    )  # fmt: skip
    inputs, dout, entering, dleaving = case.tensors()

    def results(backend, dtype):
        to = lambda x: None if x is None else x.to(dtype)  # noqa: E731
        options, spans = MapOptions(kind(name), 0.5, backend), case.spans
        mine = Inputs(*map(to, inputs))
        out = begin_forward(mine, spans, options).finish(to(entering))
        work = begin_backward(mine, to(dout), spans, options, to(entering))
        found = {"out": out, "dstate": work.outgoing.state}
        return found | work.finish(to(dleaving))._asdict()

    exact = {n: x for n, x in results("aten", torch.float64).items() if x is not None}
    bounds = errors(results("reference", torch.float32), exact)
    for label, error in errors(results("aten", torch.float32), exact).items():
        assert error <= 2 * bounds[label], (label, error, bounds[label])


@pytest.mark.parametrize("log_decay", [pytest.param(-1e-5, marks=pytest.mark.exhaustive), -1e-7])
def test_decay_over_100_000_positions_is_exact(log_decay):
    """A first token's share at position 100,000, where rounding a chunk's decay each time would be
    off by 1,600 × 2⁻²⁵ = 4.8e-5."""
    tokens = 100_000
    k = torch.zeros(1, tokens, 1, 1)
    k[0, 0] = 1
    decay = torch.tensor([log_decay], dtype=torch.float64)
    inputs = Inputs(torch.ones(1, tokens, 1, 1), k, k, decay)
    spans = SpanStates(np.array([0, tokens]), np.array([-1]), np.array([-1]))
    work = begin_forward(inputs, spans, MapOptions(kind("constant_decay"), 1.0, "aten"))
    out = work.finish(None)[0, :, 0, 0].double()
    expected = torch.exp(torch.arange(tokens) * log_decay)
    # One rounding each of the state, of the decay since the chunk's start, and of their product;
    # the sum of 64 log decays has as many, of a number below 1e-3.
    assert ((out - expected).abs() / expected).max() <= 4 * 2**-24


@pytest.mark.parametrize("name", ["linear", "vector_decay"])
def test_what_rows_add_to_states_is_computed_once(name):
    """Also where a state enters, so that maps are needed first: as many FLOPs as without."""
    counts = []
    for entered in (0, 1):
        case = RecurrentCase(name, edges=(0, 200), entered=(entered,), left=(1,))
        inputs, _, entering, _ = case.tensors()
        with FlopCounterMode(display=False) as counter:
            work = begin_forward(inputs, case.spans, MapOptions(kind(name), 1.0, "aten"))
            work.finish(entering)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


LAYOUT, DOCUMENT, TOKEN = Layout.zigzag([0, 25, 60], 3), 25, 40


def attend(comm, call, place, backend):
    """out and dq of the whole pack, where one token of one input is NaN."""
    arguments = {}
    for name, x in zip(NAMES, call.case.tensors()[0], strict=True):
        if name == place:
            x[:, TOKEN] = math.nan
        if x is not None:
            constant = name == "log_decay" and kind(call.kind).decay == "constant"
            arguments[name] = x if constant else LAYOUT.shard(x, comm.rank, 1).requires_grad_()
    with use_backend(backend):
        out = RecurrentAttention(comm, call.kind, call.transport)(**arguments, layout=LAYOUT)
        out.sum().backward()
    return [LAYOUT.unshard(x, comm, 1) for x in (out.detach(), arguments["q"].grad)]


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_nan_is_kept_and_stays_in_its_document(name, backend):
    call = RecurrentCall(name, LAYOUT, TRANSPORTS[list(KINDS).index(name) % 3])
    gates = {"log_decay": kind(name).decay in ("head", "key"), "beta": kind(name).uses_beta}
    for place in [x for x in NAMES if gates.get(x, True)]:
        later = slice(TOKEN, TOKEN + 1 if place == "q" else None)
        for out, dq in virtual(3, attend, call, place, backend):
            assert out[:, later].isnan().all()
            assert out[:, :DOCUMENT].isfinite().all() and dq[:, :DOCUMENT].isfinite().all()
