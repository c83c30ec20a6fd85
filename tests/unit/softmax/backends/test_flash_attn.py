"""The backend "flash_attn", with the package replaced by a stand-in of the same signatures that
computes with ATen."""

import importlib.util
import sys
import types

import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from seqpar.softmax.backends import flash_attn
from tests.support.cases import Case, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):  # fmt: skip # noqa: E501
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (
        0.0,
        -1,
        -1,
        0.0,
        None,
    )
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse.contiguous(), None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip # noqa: E501
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    operands = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    for target, x in zip(
        (dq, dk, dv), op(*operands, softmax_lse, 0.0, causal, scale=softmax_scale), strict=True
    ):
        target.copy_(x.transpose(1, 2))


@pytest.fixture
def package(monkeypatch):
    interface = types.SimpleNamespace(
        _flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward
    )
    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (9, 0)},
        {"softcap": 2.0},
        {"alibi": "heads"},
        {"dlse": True, "sinks": True},
        {"scale": -0.5},
        {"scale": 0.0},
    ],
)
def test_equals_the_oracle(package, strategy, options):
    case = Case(
        strategy,
        Layout.zigzag([0, 40, 41, 90], 3),
        causal=True,
        dtype=torch.bfloat16,
        backend="flash_attn",
        **options,
    )
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype, roundings=4)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="the package is there"
)
def test_without_the_package_the_call_is_refused():
    def refused(comm):
        q = torch.zeros(4, 1, 8, dtype=torch.bfloat16)
        with (
            use_backend("flash_attn"),
            pytest.raises(ValueError, match="flash-attn, which is not installed"),
        ):
            make_attention("ring", comm)(q, q, q, Layout.zigzag(4, 1), causal=True)

    virtual(1, refused)
