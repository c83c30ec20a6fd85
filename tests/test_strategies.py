"""Every strategy against the oracle, forward and backward, on real ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cu_seqlens, layouts, oracle, run

STRATEGIES = ["ring", "all_gather", "ulysses"]
NAMES = ["out", "lse", "dq", "dk", "dv", "dsinks"]


def assert_equal(got, expected, bound):
    for name, x, y in zip(NAMES, got, expected, strict=False):
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y), err_msg=name)
        finite = np.isfinite(y)
        error = np.abs(x[finite] - y[finite]).max(initial=0)
        assert error <= bound * max(1.0, np.abs(y[finite]).max(initial=0)), f"{name} is off by {error}"


@st.composite
def cases(draw, dtype, max_tokens=40):
    ranks = draw(st.integers(1, 4))
    cu = draw(cu_seqlens(max_tokens))
    kv_cu = draw(st.one_of(st.none(), cu_seqlens(max_tokens, documents=len(cu) - 1)))
    kv_heads = draw(st.integers(1, 3))
    prefix = draw(st.one_of(st.none(), st.tuples(*[st.integers(0, int(n)) for n in np.diff(kv_cu or cu)])))
    case = Case(
        strategy=draw(st.sampled_from(STRATEGIES)),
        layout=draw(layouts(cu, ranks)),
        causal=draw(st.booleans()),
        kv_layout=None if kv_cu is None else draw(layouts(kv_cu, ranks)),
        window=draw(st.sampled_from([(-1, -1), (5, 0), (3, 7), (0, 0), (-1, 2), (12, -1)])),
        prefix=prefix,
        scale=draw(st.sampled_from([None, 0.3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        sinks=draw(st.booleans()),
        dlse=draw(st.booleans()),
        batch=draw(st.sampled_from([None, None, 2])),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 5, 8, 16])),
        value_dim=draw(st.sampled_from([3, 8, 16])),
        dtype=dtype,
        backend=draw(st.sampled_from(["aten", "aten", "reference"])),
        seed=draw(st.integers(0, 1000)),
    )
    return ranks, case


@settings(max_examples=150)
@given(drawn=cases(torch.float64))
def test_equals_the_oracle(pool, drawn):
    ranks, case = drawn
    expected = oracle(case)
    for got in pool(ranks, run, case):
        assert_equal(got, expected, 1e-10)
