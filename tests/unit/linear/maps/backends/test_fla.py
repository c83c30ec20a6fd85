"""The backend "fla", with the package replaced by a stand-in of the same signatures that computes
with the plain recurrence; and, where fla-core is there, its signatures and its naive references."""

import dataclasses
import importlib
import inspect
import sys
import types

import numpy as np
import pytest
import torch

from seqpar.attention.backend import current_backend, use_backend
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import KINDS, kind
from seqpar.linear.maps.backends import fla
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import apply
from seqpar.linear.routes import SpanStates
from tests.support.recurrent_cases import RecurrentCase, run
from tests.support.tiers import few_rows

KIND_OF = {
    "simple_gla": "scalar_decay",
    "gla": "vector_decay",
    "delta_rule": "delta",
    "gated_delta_rule": "gated_delta",
    "kda": "kda",
}


class _Recurrence(torch.autograd.Function):
    """out and last states of sequences, by the reference backend."""

    @staticmethod
    def forward(ctx, name, scale, cu_seqlens, initial, q, k, v, g, beta):
        count = len(cu_seqlens) - 1
        ctx.this = kind("linear" if name == "simple_gla" and g is None else KIND_OF[name])
        ctx.spans = SpanStates(cu_seqlens.numpy(), np.arange(count), np.arange(count))
        ctx.options = MapOptions(ctx.this, scale, "reference")
        ctx.has_initial = initial is not None
        ctx.initial = q.new_zeros(count, 1, k.shape[2], k.shape[3], v.shape[3])
        if initial is not None:
            ctx.initial = initial[:, None].clone()
        ctx.inputs = Inputs(q, k, v, g, beta)
        work = begin_forward(ctx.inputs, ctx.spans, ctx.options)
        last = work.outgoing.state + apply(ctx.this, work.outgoing.transition, ctx.initial)
        return work.finish(ctx.initial), last[:, 0]

    @staticmethod
    def backward(ctx, dout, dlast):
        initial, dlast = ctx.initial, dlast[:, None]
        work = begin_backward(ctx.inputs, dout, ctx.spans, ctx.options, initial)
        dinitial = work.outgoing.state + apply(ctx.this, work.outgoing.transition, dlast)
        found = work.finish(dlast)
        return None, None, None, dinitial[:, 0] if ctx.has_initial else None, *found


def stand_in(name):
    def function(q, k, v, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, g=None, beta=None):  # fmt: skip # noqa: E501
        assert output_final_state and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert q.shape[0] == 1 and (cu_seqlens.diff() > 0).all() and q.shape == k.shape
        assert all(x is None or x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
        operands = initial_state, q, k, v, g, beta
        return _Recurrence.apply(name, scale, cu_seqlens, *operands)

    return function


@pytest.fixture
def package(monkeypatch):
    for name in KIND_OF:
        module = types.ModuleType(f"fla.ops.{name}")
        setattr(module, f"chunk_{name}", stand_in(name))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


@few_rows()
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize("name", KINDS)
def test_equals_the_reference(package, name, heads):
    """Up to the last digits, since sums over rows and heads have another order."""
    states = [(None, None), ((1, 0, 1, 0), (0, 1, 1, 0)), ((0, 0, 0, 0), (0, 0, 1, 1))]
    for entered, left in (*states, ((1, 1, 1, 1), (0, 0, 0, 0))):
        case = RecurrentCase(
            name, edges=(0, 7, 7, 8, 15), dtype=torch.float32, entered=entered, left=left,
            q_heads=heads[0], k_heads=heads[1], v_heads=heads[2], backend="fla",
        )  # fmt: skip
        found, expected = run(case), run(dataclasses.replace(case, backend="reference"))
        for label, y in expected.items():
            torch.testing.assert_close(found[label], y, rtol=1e-5, atol=1e-5, msg=label)


@pytest.mark.parametrize("name", ["linear", "gated_delta"])
def test_without_rows_or_batch(package, name):
    for edges, batch in (((0,), 2), ((0, 0, 0), 2), ((0, 5, 9), 0)):
        case = RecurrentCase(name, edges=edges, batch=batch, dtype=torch.float32, backend="fla")
        found, expected = run(case), run(dataclasses.replace(case, backend="reference"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[label], y) for label, y in expected.items())


def test_a_missing_package_or_gpu_is_refused(monkeypatch):
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert "fla-core, which is not installed" in fla.refusal(q, q)
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: name)
    assert fla.refusal(q, q).startswith("q must be bf16 or fp16 on a CUDA device")
    assert "got torch.float32 on cpu" in fla.refusal(q.float(), q.float())


@pytest.mark.parametrize("fault", ["broken", "too old"])
def test_a_broken_package_is_refused(package, monkeypatch, fault):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16, device="meta")
    fla._broken.cache_clear()
    assert fla.refusal(q, q) is None
    module = sys.modules["fla.ops.kda"]
    if fault == "broken":
        monkeypatch.delattr(module, "chunk_kda")
    else:
        monkeypatch.setattr(module, "chunk_kda", lambda q, initial_state, cu_seqlens: None)
    fla._broken.cache_clear()
    words = {"broken": "cannot be imported: AttributeError", "too old": "has no cu_seqlens_cpu"}
    assert words[fault] in fla.refusal(q, q)
    fla._broken.cache_clear()


def test_use_backend_takes_it_for_recurrent_attention_alone():
    with use_backend("fla"):
        assert current_backend("recurrent") == "fla"
        assert {current_backend(x) for x in ("linear", "softmax")} == {"default"}


def of_fla(module):
    pytest.importorskip("fla", reason="fla-core is not installed")
    return importlib.import_module(f"fla.ops.{module}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KIND_OF)
def test_its_functions_take_these_arguments(name):
    function = getattr(of_fla(name), f"chunk_{name}")
    inspect.signature(function).bind(
        q=0, k=0, v=0, scale=1.0, initial_state=0, output_final_state=True, cu_seqlens=0,
        cu_seqlens_cpu=0, **({"beta": 0} if kind(KIND_OF[name]).uses_beta else {}),
        **({"g": 0} if kind(KIND_OF[name]).decay else {}),
    )  # fmt: skip


@few_rows()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_its_naive_references_agree(name, backend):
    """They compute in fp32, as we do, and all but KDA's without shared heads."""
    heads = (2, 2, 4) if name == "kda" else (2, 2, 2)
    case = RecurrentCase(
        name, edges=(0, 80), dtype=torch.float32, scale=8**-0.5, entered=(1,), left=(1,),
        q_heads=heads[0], k_heads=heads[1], v_heads=heads[2], backend=backend,
    )  # fmt: skip
    inputs, _, entering, _ = case.tensors()
    q, k, v, g, beta = inputs
    state = entering[0]
    if name in ("linear", "constant_decay", "scalar_decay"):
        g = torch.zeros(1) if g is None else g
        g = g.expand(*q.shape[:2], heads[2])
        naive = of_fla("simple_gla.naive").naive_recurrent_simple_gla
        out, last = naive(q, k, v, g, case.scale, state, True)
    elif name == "vector_decay":
        naive = of_fla("gla.naive").naive_recurrent_gla
        out, last = naive(q, k, v, g, state, True)
    elif name == "delta":
        naive = of_fla("delta_rule.naive").delta_rule_recurrence
        out, last = naive(*(x.transpose(1, 2) for x in (q, k, v, beta)), state, True)
        out = out.transpose(1, 2)
    elif name == "gated_delta":
        naive = of_fla("gated_delta_rule.naive").naive_recurrent_gated_delta_rule
        out, last = naive(q, k, v, beta, g, case.scale, state, True)
    else:
        naive = of_fla("kda.naive").naive_recurrent_kda
        out, last = naive(q, k, v, g, beta, case.scale, state, True)
    found = run(case)
    torch.testing.assert_close(found["out"], out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["state_out"][0], last, rtol=1e-4, atol=1e-5)
