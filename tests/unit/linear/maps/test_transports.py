"""Recurrent attention on virtual ranks, by each transport: exactness, and states that go on."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given

from seqpar import Layout, RecurrentAttention
from seqpar.comm.messages.comm import Comm
from seqpar.linear.kinds import KINDS
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support.cases import rms
from tests.support.linear_cases import assert_right
from tests.support.ranks import virtual
from tests.support.recurrent_calls import RecurrentCall, oracle, recurrent_calls, run
from tests.support.tiers import examples, few_rows
from tests.unit.linear.test_final_states import DOCUMENTS, LAYOUTS

KINDS_OF = sorted(KINDS)


def is_refused(call):
    """Whether a document is dealt to some rank in more than 4 spans so short that their maps
    outweigh their tokens."""
    case = call.case
    numbers = {"head": 1, "key": case.dim, "matrix": case.dim**2}[KINDS[call.kind].transition]
    if call.kind in ("linear", "constant_decay") and call.transport != "tree":
        numbers = 0  # LASP-2 and ZeCO send states alone
    exact = 8 if case.dtype == torch.float64 else 4
    sizes = (case.dim + case.value_dim) * case.dtype.itemsize
    least = (numbers + case.dim * case.value_dim) * exact / sizes
    for rank in range(call.layout.ranks):
        spans = call.layout.spans(rank)
        for _, part in itertools.groupby(spans, key=lambda span: span.document):
            lengths = [span.stop - span.start for span in part]
            if len(lengths) > 4 and np.mean(lengths) < least:
                return True
    return False


def assert_equals_the_formula(call, ranks):
    expected = oracle(call)
    for got in virtual(ranks, run, call):
        assert_right(got, expected, call.dtype)


@examples(12, 100)
@given(drawn=recurrent_calls(torch.float64))
def test_equals_the_recurrence(drawn):
    """Any kind, layout, ranks, transport, number of blocks and heads, with and without initial and
    final states."""
    ranks, call = drawn
    if is_refused(call):
        with pytest.raises(ValueError, match="layout must have spans of at least"):
            virtual(ranks, run, call)
        return
    assert_equals_the_formula(call, ranks)


@few_rows()
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS_OF)
def test_all_kinds_and_transports(kind, transport, layout, ranks):
    """Outputs, final states and all gradients; the final states are the same bits on all ranks."""
    layout = LAYOUTS[layout](DOCUMENTS, ranks)
    call = RecurrentCall(kind, layout, transport, begun=True, returned=True)
    expected, found = oracle(call), virtual(ranks, run, call)
    for got in found:
        assert_right(got, expected, call.dtype)
        assert np.array_equal(got["state_out"], found[0]["state_out"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_same_bits_each_time(transport):
    layout = Layout.zigzag([0, 90, 200], 4)
    call = RecurrentCall("gated_delta", layout, transport, options=(("dtype", torch.float32),))
    first, second = (virtual(4, run, call)[1] for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@functools.cache
def on_one_device(kind, dtype):
    """A call of 1,024 tokens, what is expected of it, and the RMS errors of one rank."""
    options = {"dtype": dtype, "dim": 32, "value_dim": 32, "log_decay": -0.05}
    call = RecurrentCall(kind, Layout.zigzag([0, 700, 1024], 1), options=tuple(options.items()))
    expected, alone = oracle(call), virtual(1, run, call)[0]
    return call, expected, {name: rms(alone[name] - y) for name, y in expected.items()}


@few_rows()
@pytest.mark.parametrize("kind", ["gated_delta", "vector_decay"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_within_1_35_of_one_device(kind, transport, ranks, dtype):
    call, expected, errors = on_one_device(kind, dtype)
    layout = Layout.zigzag([0, 700, 1024], ranks)
    got = virtual(ranks, run, dataclasses.replace(call, layout=layout, transport=transport))[0]
    for name, y in expected.items():
        assert rms(got[name] - y) <= 1.35 * errors[name], name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_documents_continue_in_the_next_batch(transport):
    """Two halves, with the state passed on, are the whole: outputs, and gradients through the
    state, of keys that are not normalised."""
    whole, half = Layout.zigzag([0, 120, 200], 2), Layout.zigzag([0, 60, 100], 2)
    case = RecurrentCall("kda", whole, options=(("key_length", 0.3), ("batch", 1))).case
    inputs, *_ = case.tensors()
    tensors = dict(zip(("q", "k", "v", "log_decay", "beta"), (x[0] for x in inputs), strict=True))
    first = torch.cat([torch.arange(60), torch.arange(120, 160)])
    second = torch.cat([torch.arange(60, 120), torch.arange(160, 200)])

    def in_parts(comm):
        rec, outs, state = RecurrentAttention(comm, "kda", transport), [], None
        mine = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        for rows in (first, second):
            parts = {name: half.shard(x[rows], comm.rank) for name, x in mine.items()}
            out, state = rec(**parts, layout=half, initial_state=state, return_state=True)
            outs.append(out)
        torch.cat(outs).square().sum().backward()
        outs = [half.unshard(out.detach(), comm) for out in outs]
        return outs, {name: x.grad for name, x in mine.items()}

    def at_once(comm):
        parts = {n: whole.shard(x, comm.rank).clone().requires_grad_() for n, x in tensors.items()}
        out = RecurrentAttention(comm, "kda", transport)(**parts, layout=whole)
        out.square().sum().backward()
        gradients = {name: whole.unshard(x.grad, comm) for name, x in parts.items()}
        return whole.unshard(out.detach(), comm), gradients

    out, gradients = virtual(2, at_once)[0]
    parts, other = virtual(2, in_parts)
    torch.testing.assert_close(parts[0][0], out[first])
    torch.testing.assert_close(parts[0][1], out[second])
    for name, expected in gradients.items():
        torch.testing.assert_close(parts[1][name] + other[1][name], expected, msg=name)


@pytest.mark.parametrize("kind", KINDS_OF)
def test_steps_go_on_where_a_call_ended(kind):
    """Two documents' last tokens, decoded one by one, are those of a call over all tokens."""
    layout, begins = Layout.contiguous([0, 20, 40], 1), Layout.contiguous([0, 17, 34], 1)
    inputs = RecurrentCall(kind, layout, batched=False).case.tensors()[0]
    rec = RecurrentAttention(Comm("one", 0, 1), kind)
    rows = torch.arange(40).view(2, 20)

    def of(tokens):
        named = zip(("q", "k", "v", "log_decay", "beta"), inputs, strict=True)
        return {n: x if x.dim() == 1 else x[0, tokens] for n, x in named if x is not None}

    whole, expected = rec(**of(rows.flatten()), layout=layout, return_state=True)
    _, state = rec(**of(rows[:, :17].flatten()), layout=begins, return_state=True)
    for t in range(17, 20):
        out, state = rec.step(**of(rows[:, t]), state=state)
        torch.testing.assert_close(out, whole[rows[:, t]])
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_empty_batch_has_empty_results(transport):
    layout = Layout.zigzag([0, 10, 40], 2)
    call = RecurrentCall("gated_delta", layout, transport, begun=True, returned=True)
    call = dataclasses.replace(call, options=(("batch", 0),))
    for got in virtual(2, run, call):
        assert {name: x.shape for name, x in got.items()} == {
            "out": (0, 40, 2, 6),
            **{f"d{name}": (0, 40, 2, 8) for name in "qk"},
            "dv": (0, 40, 2, 6),
            **{f"d{name}": (0, 40, 2) for name in ("log_decay", "beta")},
            **dict.fromkeys(("state_out", "dstate_in"), (2, 0, 2, 8, 6)),
        }


@pytest.mark.parametrize("kind", ["linear", "gated_delta"])
def test_a_scale_for_each_of_fewer_query_heads(kind):
    """It multiplies the queries, and each head's gradient comes from all states that it reads."""
    layout, rec = Layout.contiguous(12, 1), RecurrentAttention(Comm("one", 0, 1), kind)
    options = (("q_heads", 2), ("k_heads", 2), ("v_heads", 4))
    inputs = RecurrentCall(kind, layout, batched=False, options=options).case.tensors()[0]
    named = zip(("q", "k", "v", "log_decay", "beta"), inputs, strict=True)
    call = {name: x[0] for name, x in named if x is not None} | {"layout": layout}
    scale = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    q, found = call.pop("q"), []
    for arguments in ({"q": q, "scale": scale}, {"q": q * scale[:, None]}):
        out = rec(**call | arguments)
        found.append((out, *torch.autograd.grad(out.square().sum(), scale)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)
