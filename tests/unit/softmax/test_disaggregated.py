"""Disaggregated attention: any plan gives the right result."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from seqpar import Layout
from seqpar.strategies import disaggregated
from tests.ranks.test_strategies import cases
from tests.support.cases import Case, assert_right, backward, begin, module, oracle, run
from tests.support.plans import PLANS, AtRandom, OnOne, at_home, at_keys
from tests.support.ranks import virtual
from tests.support.tiers import examples, few_rows

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


@few_rows()
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_gives_the_right_result(plan, options):
    made = case(PLANS[plan], **OPTIONS[options])
    assert_right(virtual(3, run, made)[0], oracle(made), torch.float64)


def refused(comm, strategy, check_ranks):
    """What a call with a plan for other documents says, and what it sends."""
    layout = Layout.zigzag([0, 9, 21], comm.size)
    q = torch.zeros(layout.tokens_on(comm.rank), 2, 8)
    attn = module(strategy, comm, plan=OTHERS, check_ranks=check_ranks)
    reason = attn.unsupported(q, q, q, layout, causal=True)
    with pytest.raises(ValueError, match=r"plan must have every pair .* \(rank \d of 4\)"):
        attn(q, q, q, layout, causal=True)
    assert reason.endswith(f"(rank {comm.rank} of 4)")
    assert check_ranks or comm.sent_bytes == 0


OTHERS = at_home(*[Layout.zigzag([0, 9, 20], 2).geometry] * 2, None)


@few_rows()
@pytest.mark.parametrize("check_ranks", [False, True])
@pytest.mark.parametrize("strategy", ["disaggregated", "usp+disaggregated"])
def test_a_plan_for_other_documents_is_refused(strategy, check_ranks):
    virtual(4, refused, strategy, check_ranks)


def test_backward_follows_its_own_plan():
    """All of it is on rank 2, where forward is on rank 0; the other ranks compute nothing."""
    options = ("plan", OnOne(0)), ("backward_plan", OnOne(2))
    made = Case("disaggregated", Layout.zigzag(DOCUMENTS, 3), causal=True, module_options=options)

    def count(comm):
        with FlopCounterMode(display=False) as forward:
            outputs, _ = begin(comm, made)
        with FlopCounterMode(display=False) as behind:
            backward(outputs)
        return [mode.get_total_flops() > 0 for mode in (forward, behind)]

    assert virtual(3, count) == [[True, False], [False, False], [False, True]]
    assert_right(virtual(3, run, made)[0], oracle(made), torch.float64)


def test_a_backward_plan_for_other_documents_is_refused():
    def refuse(comm):
        layout = Layout.zigzag([0, 9, 21], comm.size)
        q = torch.zeros(layout.tokens_on(comm.rank), 2, 8)
        with pytest.raises(ValueError, match="backward_plan must have every pair"):
            module("disaggregated", comm, backward_plan=OTHERS)(q, q, q, layout, causal=True)
        assert comm.sent_bytes == 0

    virtual(2, refuse)


RANK = threading.local()


def by_rank(queries, keys, mask):
    """Plan as no plan may: other ranks have another one."""
    return (at_home, at_keys)[RANK.number](queries, keys, mask)


@pytest.mark.parametrize("option", ["plan", "backward_plan"])
def test_the_rank_check_finds_different_plans(option):
    def refuse(comm):
        RANK.number, layout = comm.rank, Layout.zigzag([0, 9, 40], 2)
        q = torch.zeros(layout.tokens_on(comm.rank), 2, 8)
        attn = module("disaggregated", comm, check_ranks=True, **{option: by_rank})
        with pytest.raises(ValueError, match=f"^{option} must be the same on all ranks: rank 0"):
            attn(q, q, q, layout, causal=True)

    virtual(2, refuse)


@pytest.mark.parametrize("keep", ["home", "server"])
def test_a_plan_gives_the_same_bits_each_time(keep):
    options = {"causal": True, "sinks": True, "dlse": True, "dtype": torch.bfloat16}
    made = case(AtRandom(3), Layout.contiguous([0, 300, 1100], 3), **options)
    plans = (("plan", AtRandom(3)), ("keep", keep))
    first, again = (
        virtual(3, run, dataclasses.replace(made, module_options=plans))[0] for _ in range(2)
    )
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


@examples(15, 50)
@given(drawn=cases(torch.float64), data=st.data())
def test_any_plan_on_any_call(drawn, data):
    ranks, drawn_case = drawn
    plans = st.one_of(
        st.sampled_from([at_home, at_keys]),
        st.builds(OnOne, st.integers(0, ranks - 1)),
        st.builds(AtRandom, st.integers(0, 1000), st.integers(0, 6)),
    )
    stage = data.draw(st.sampled_from([1, 5, 1024]))
    options = [("plan", data.draw(plans)), ("keep", data.draw(st.sampled_from(["home", "server"])))]
    if options[1][1] == "home":
        options.append(("backward_plan", data.draw(st.none() | plans)))
    made = dataclasses.replace(drawn_case, strategy="disaggregated", module_options=tuple(options))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disaggregated, "_ROWS_PER_STAGE", stage)
        got = virtual(ranks, run, made)
    assert_right(got[0], oracle(made), torch.float64)
