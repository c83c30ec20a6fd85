"""Every strategy against the oracle, forward and backward, on real ranks."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from tests.support.cases import (
    STRATEGIES,
    VARIANTS,
    Case,
    assert_right,
    cu_seqlens,
    layouts,
    module,
    oracle,
    run,
)
from tests.support.mask_cases import disjoint_ranges
from tests.support.tiers import examples

EXHAUSTIVE = pytest.mark.exhaustive


@st.composite
def cases(draw, dtype, max_tokens=40):
    ranks = draw(st.integers(1, 4))
    cu = draw(cu_seqlens(max_tokens))
    kv_cu = draw(st.one_of(st.none(), cu_seqlens(max_tokens, documents=len(cu) - 1)))
    kv_heads = draw(st.integers(1, 3))
    prefix = draw(
        st.one_of(st.none(), st.tuples(*[st.integers(0, int(n)) for n in np.diff(kv_cu or cu)]))
    )
    listed = draw(st.sampled_from([False, False, True]))
    case = Case(
        strategy=draw(st.sampled_from([*STRATEGIES, *VARIANTS])),
        layout=draw(layouts(cu, ranks)),
        ranges=disjoint_ranges(draw(st.integers(0, 2**32 - 1)), cu, kv_cu) if listed else None,
        causal=draw(st.booleans()),
        kv_layout=None if kv_cu is None else draw(layouts(kv_cu, ranks)),
        window=draw(st.sampled_from([(-1, -1), (5, 0), (3, 7), (0, 0), (-1, 2), (12, -1)])),
        prefix=prefix,
        scale=draw(st.sampled_from([None, 0.3, -0.5, 0.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        alibi=draw(st.sampled_from(["", "", "heads"])),
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


@examples(10, 50)
@given(drawn=cases(torch.float64))
def test_equals_the_oracle(pool, drawn):
    ranks, case = drawn
    expected = oracle(case)
    for got in pool(ranks, run, case):
        assert_right(got, expected, case.dtype)


@examples(6, 20)
@given(drawn=st.sampled_from([torch.float32, torch.bfloat16]).flatmap(cases))
def test_short_precisions_stay_near_the_oracle(pool, drawn):
    ranks, case = drawn
    expected = oracle(case)
    assert_right(pool(ranks, run, case)[0], expected, case.dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_token_moves_nothing_before_it(pool, strategy):
    """The causality probe: with token t of q, k and v changed, what comes before it keeps its bits,
    so do other documents."""
    cu, token = [0, 13, 40], 20
    case = Case(strategy, Layout.striped(cu, 3, stripe=2), causal=True, window=(9, -1))
    before = pool(3, outputs, case, None)[0]
    after = pool(3, outputs, case, token)[0]
    changed = (before != after).any(axis=(1, 2))
    assert changed[token:30].all() and not changed[:token].any() and not changed[30:].any()


def outputs(group, case, perturbed):
    attn = module(case.strategy, group)
    q, k, v, *_ = case.inputs()
    if perturbed is not None:
        for x in (q, k, v):
            x[perturbed] += 1
    rank = attn.rank
    out = attn(*(case.layout.shard(x, rank) for x in (q, k, v)), case.layout, **case.options())
    return case.layout.unshard(out, group).numpy()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_may_be_permuted(pool, strategy):
    lengths, order = np.array([7, 1, 20, 12]), [2, 0, 3, 1]
    cu = np.r_[0, np.cumsum(lengths)]
    case = Case(strategy, Layout.zigzag(cu, 3), causal=True)
    index = np.concatenate([np.arange(cu[d], cu[d + 1]) for d in order])
    moved = dataclasses.replace(case, layout=Layout.zigzag(np.r_[0, np.cumsum(lengths[order])], 3))
    permuted = pool(3, outputs_permuted, moved, index)[0]
    np.testing.assert_allclose(permuted, pool(3, outputs, case, None)[0][index], rtol=0, atol=1e-13)


def outputs_permuted(group, case, index):
    attn = module(case.strategy, group)
    q, k, v, *_ = (x[index] for x in case.inputs()[:3])
    rank = attn.rank
    out = attn(*(case.layout.shard(x, rank) for x in (q, k, v)), case.layout, **case.options())
    return case.layout.unshard(out, group).numpy()


SAME_CALLS = []  # a strategy repeats one dtype once, and the other often
for i, name in enumerate(STRATEGIES):
    once, often = (torch.float32, torch.bfloat16)[:: -1 if i % 2 else 1]
    SAME_CALLS += [(name, once, 2), pytest.param(name, often, 10, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize(("strategy", "dtype", "times"), SAME_CALLS)
def test_the_same_call_gives_the_same_bits(pool, strategy, dtype, times):
    case = Case(
        strategy,
        Layout.zigzag([0, 130, 400], 4),
        causal=True,
        heads=6,
        kv_heads=3,
        dtype=dtype,
        sinks=True,
        dlse=True,
    )
    first = pool(4, run, case)
    for again in (pool(4, run, case) for _ in range(times - 1)):
        for x, y in zip(itertools.chain(*first), itertools.chain(*again), strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize(
    "strategy",
    ["ring", *(pytest.param(x, marks=EXHAUSTIVE) for x in ("all_gather", "ulysses", "usp"))],
)
def test_padded_triton_tables_equal_the_oracle(pool, strategy):
    """With a limit on documents. On a CPU, in Triton's interpreter, which is not for threads."""
    layout = Layout.contiguous([0, 7, 7, 60, 63, 99], 2, equal=True, most_documents=7)
    for options in (
        {"causal": True, "dlse": True, "sinks": True},
        {"causal": False, "window": (9, 20)},
    ):
        sizes = {"heads": 4, "kv_heads": 2, "dim": 16, "value_dim": 16, "dtype": torch.float32}
        case = Case(strategy, layout, backend="triton", **sizes, **options)
        expected = oracle(case)
        for got in pool(2, run, case):
            assert_right(got, expected, case.dtype)
