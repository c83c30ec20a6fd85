"""Disaggregated attention: any plan gives the right result."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.strategies import disaggregated
from tests.ranks.test_strategies import cases
from tests.support.cases import Case, assert_right, oracle, run
from tests.support.plans import PLANS, AtRandom, OnOne, at_home, at_keys
from tests.support.ranks import virtual
from tests.support.tiers import examples

DOCUMENTS = [0, 37, 38, 38, 90]
OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": (10, 0)},
    "prefix": {"causal": True, "prefix": (30, 0, 0, 5), "window": (9, 0)},
    "cross": {"causal": True, "kv_layout": Layout.striped([0, 64, 70, 75, 90], 3, 2)},
    "all": {"causal": True, "sinks": True, "dlse": True, "batch": 2, "softcap": 2.0, "heads": 6,
            "kv_heads": 3},
}  # fmt: skip


def case(plan, layout=None, **options):
    layout = layout or Layout.zigzag(DOCUMENTS, 3)
    return Case("disaggregated", layout, module_options=(("plan", plan),), **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_gives_the_right_result(plan, options):
    made = case(PLANS[plan], **OPTIONS[options])
    assert_right(virtual(3, run, made)[0], oracle(made), torch.float64)


@examples(40, 400)
@given(drawn=cases(torch.float64), data=st.data())
def test_any_plan_on_any_call(drawn, data):
    ranks, drawn_case = drawn
    plan = data.draw(
        st.one_of(
            st.sampled_from([at_home, at_keys]),
            st.builds(OnOne, st.integers(0, ranks - 1)),
            st.builds(AtRandom, st.integers(0, 1000), st.integers(0, 6)),
        )
    )
    stage = data.draw(st.sampled_from([1, 5, 1024]))
    options = ("plan", plan), ("keep", data.draw(st.sampled_from(["home", "server"])))
    made = dataclasses.replace(drawn_case, strategy="disaggregated", module_options=options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "_ROWS", stage)
        got = virtual(ranks, run, made)
    assert_right(got[0], oracle(made), torch.float64)
