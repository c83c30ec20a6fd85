"""LASP-2 on virtual ranks: exactness, causality, decay, learned scales, and states that go on."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from seqpar import LASP2Attention, Layout, use_backend
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.backends import aten
from seqpar.linear.states.state_options import StateOptions
from tests.support.cases import rms
from tests.support.linear_cases import LinearCase, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@functools.cache
def on_one_device(dtype):
    """A case of 1,024 tokens, what is expected of it, and the RMS errors of one rank."""
    case = LinearCase(
        Layout.zigzag([0, 700, 1024], 1), decay=0.02, dtype=dtype, dim=32, value_dim=32, chunk=64
    )
    expected, alone = oracle(case), virtual(1, run, case)[0]
    return case, expected, {name: rms(alone[name] - y) for name, y in expected.items()}


@few_rows()
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_within_1_35_of_one_device(dtype, ranks, transport):
    case, expected, errors = on_one_device(dtype)
    got = virtual(
        ranks,
        run,
        dataclasses.replace(case, layout=Layout.zigzag([0, 700, 1024], ranks), transport=transport),
    )[0]
    for name, y in expected.items():
        assert rms(got[name] - y) <= 1.35 * errors[name], name


def test_same_bits_each_time():
    case = LinearCase(Layout.zigzag([0, 90, 200], 4), dtype=torch.float32)
    for transport in ("all_gather", "scan"):
        first, second = (
            virtual(4, run, dataclasses.replace(case, transport=transport))[1] for _ in range(2)
        )
        assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_a_perturbation_stays_after_it_in_its_document(backend):
    """Nor, within a chunk, the token just before it: LASP-2's published masked operator had no mask
    on the diagonal block."""
    cu, changed = [0, 150, 330], 40
    layout = Layout.zigzag(cu, 2)
    q, k, v = (
        torch.randn(330, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    )

    def call(comm, k, v):
        return layout.unshard(
            LASP2Attention(comm)(*(layout.shard(x, comm.rank) for x in (q, k, v)), layout), comm
        )

    with use_backend(backend):
        before = virtual(2, call, k, v)[0]
        k, v = k.clone(), v.clone()
        k[changed] += 1
        v[changed] += 1
        moved = (virtual(2, call, k, v)[0] != before).flatten(1).any(1)
    assert not moved[:changed].any() and moved[changed:150].all() and not moved[150:].any()


def test_no_output_is_zero_and_none_is_lost():
    """300 tokens, no multiple of a block: published code returned 256 zero rows, or a tail of
    uninitialised memory."""
    for causal in (True, False):
        case = LinearCase(Layout.contiguous(300, 1), causal=causal, decay=None, chunk=128)
        out = virtual(1, run, case)[0]["out"]
        assert (abs(out).max((1, 2)) > 0).all()
        assert_right({"out": out}, {"out": oracle(case)["out"]}, case.dtype)


@pytest.mark.parametrize("log_decay", [-1e-5, -1e-7])
def test_decay_over_100_000_positions_is_exact(log_decay):
    """A first token's share at position 100,000, where rounding λ^C once a chunk would be off by
    800 × 2⁻²⁵ = 2.4e-5."""
    tokens, ranks = 100_000, 4
    layout = Layout.contiguous(tokens, ranks)
    decay = torch.tensor([log_decay], dtype=torch.float64)
    k = torch.zeros(tokens, 1, 1)
    k[0] = 1

    def call(comm):
        aten.CHUNK = 128
        q, mine = (layout.shard(x, comm.rank) for x in (torch.ones(tokens, 1, 1), k))
        return LASP2Attention(comm)(q, mine, mine, layout, log_decay=decay)

    out = torch.cat(virtual(ranks, call))[:, 0, 0].double()
    expected = torch.exp(torch.arange(tokens) * log_decay)
    assert (
        (out - expected).abs() / expected
    ).max() <= 8 * 2**-24  # one rounding each in a chunk, a block, and a rank


def test_documents_continue_in_the_next_batch():
    """Two halves, with the state passed on, are the whole: outputs, and gradients through the
    state."""
    whole, half = Layout.zigzag([0, 120, 200], 2), Layout.zigzag([0, 60, 100], 2)
    case = LinearCase(whole)
    x = [t.clone().requires_grad_() for t in case.inputs()[:3]]
    first = torch.cat([torch.arange(60), torch.arange(120, 160)])
    second = torch.cat([torch.arange(60, 120), torch.arange(160, 200)])

    def in_parts(comm):
        lin, outs, state = LASP2Attention(comm), [], None
        mine = [t.detach().clone().requires_grad_() for t in x]
        for rows in (first, second):
            parts = (half.shard(t[rows], comm.rank) for t in mine)
            out, state = lin(
                *parts, half, log_decay=case.log_decay, initial_state=state, return_state=True
            )
            outs.append(out)
        torch.cat(outs).square().sum().backward()
        return [half.unshard(out.detach(), comm) for out in outs], [t.grad for t in mine]

    def at_once(comm):
        parts = [whole.shard(t.detach(), comm.rank).requires_grad_() for t in x]
        out = LASP2Attention(comm)(*parts, whole, log_decay=case.log_decay)
        out.square().sum().backward()
        return whole.unshard(out.detach(), comm), [whole.unshard(t.grad, comm) for t in parts]

    out, gradients = virtual(2, at_once)[0]
    parts, other = virtual(2, in_parts)
    torch.testing.assert_close(parts[0][0], out[first])
    torch.testing.assert_close(parts[0][1], out[second])
    for expected, mine, theirs in zip(gradients, parts[1], other[1], strict=True):
        torch.testing.assert_close(mine + theirs, expected)


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_batch_has_empty_results(causal, transport):
    layout, decay = Layout.zigzag([0, 10, 40], 2), 0.1 if causal else None
    case = LinearCase(layout, causal, decay, begun=True, returned=True, batch=0)
    expected = oracle(case)
    for got in virtual(2, run, dataclasses.replace(case, transport=transport)):
        assert {name: x.shape for name, x in got.items()} == {
            name: x.shape for name, x in expected.items()
        }


def test_in_one_piece_or_in_steps():
    """With and without `local`, in chunks of 16 or 128 rows: the same numbers, of each backend."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, 133, h, 6, generator=generator, dtype=torch.float64) for h in (4, 2, 2, 4)
    )
    decay = torch.tensor([-0.05, -2.0], dtype=torch.float64)
    spans = SpanStates(
        np.array([0, 5, 40, 40, 133]), np.array([0, -1, 1, 2]), np.array([-1, 0, 1, 2])
    )
    initial, dfinal = torch.randn(2, 3, 2, 2, 6, 6, generator=generator, dtype=torch.float64)
    results = []
    for backend, chunk, in_steps in itertools.product(
        ("reference", "aten"), (16, 128), (True, False)
    ):
        aten.CHUNK = chunk
        options = StateOptions(0.7, True, backend, decay)
        works = (
            begin_forward(Inputs(q, k, v), spans, options),
            begin_backward(Inputs(q, k, v), dout, spans, options, initial),
        )
        for work in works if in_steps else ():
            work.local()
        forward, backward = works
        results.append([forward.outgoing, forward.finish(initial)])
        results[-1] += [backward.outgoing, *backward.finish(dfinal)]
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            torch.testing.assert_close(x, y)


SCALES = {"one": 0.3, "of heads": [0.3, -0.7, 0.0, 1.5], "zero": 0.0}


@few_rows()
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("causal", [True, False])
def test_its_gradient_is_that_of_a_linear_function(causal, scale):
    case = LinearCase(Layout.zigzag([0, 30, 70], 2), causal)

    def call(comm):
        q, k, v, dout = (case.layout.shard(x, comm.rank) for x in case.inputs()[:4])
        lin, options = LASP2Attention(comm), {"causal": causal}
        plain = lin(q, k, v, case.layout, **options)
        values = torch.tensor(SCALES[scale], dtype=torch.float64, requires_grad=True)
        scaled = lin(q, k, v, case.layout, scale=values, **options)
        scaled.backward(dout)
        products = (plain * dout).sum((0, 2))
        torch.testing.assert_close(scaled.detach(), plain * values.detach().reshape(-1, 1))
        torch.testing.assert_close(values.grad, products if values.dim() else products.sum())
        learned = values.detach().requires_grad_()
        assert lin.traffic(q, k, v, case.layout, scale=learned, **options)

    virtual(2, call)


def test_a_scale_without_gradient_is_a_number():
    case = LinearCase(Layout.contiguous(9, 1))

    def call(comm):
        q, k, v = case.inputs()[:3]
        lin = LASP2Attention(comm)
        as_tensor, as_number = (
            lin(q, k, v, case.layout, scale=scale) for scale in (torch.tensor(0.5), 0.5)
        )
        assert torch.equal(as_tensor, as_number)

    virtual(1, call)
