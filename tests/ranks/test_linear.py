"""LASP-2 against the recurrence, on real ranks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from tests.support.linear_cases import LinearCase, assert_right, linear_cases, oracle, run
from tests.support.tiers import examples


def is_refused(case):
    """Whether a document is dealt to some rank in more than 4 spans so short that their states
    outweigh their tokens."""
    least = (
        case.dim
        * case.value_dim
        * case.exact.itemsize
        / ((case.dim + case.value_dim) * case.dtype.itemsize)
    )
    for rank in range(case.layout.ranks):
        for _, spans in itertools.groupby(case.layout.spans(rank), key=lambda span: span.document):
            lengths = [span.stop - span.start for span in spans]
            if case.causal and len(lengths) > 4 and np.mean(lengths) < least:
                return True
    return False


def assert_equals_the_oracle(pool, ranks, case):
    if is_refused(case):
        answers = pool.each(ranks, run, case)
        assert all(
            kind == "error" and "layout must have spans of at least" in value[1]
            for kind, value in answers
        )
        return
    expected = oracle(case)
    for got in pool(ranks, run, case):
        assert_right(got, expected, case.dtype)


@examples(12, 50)
@given(drawn=linear_cases(torch.float64))
def test_equals_the_recurrence(pool, drawn):
    """Any layout, ranks, chunk size and number of blocks, with and without decay, initial and final
    states."""
    assert_equals_the_oracle(pool, *drawn)


@examples(6, 25)
@given(drawn=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]).flatmap(linear_cases))
def test_short_precisions_stay_near_it(pool, drawn):
    assert_equals_the_oracle(pool, *drawn)


@pytest.mark.parametrize("causal", [True, False])
def test_the_triton_backend_on_ranks(pool, causal):
    """On a CPU, in Triton's interpreter, which is not for threads."""
    case = LinearCase(
        Layout.zigzag([0, 70, 100], 2),
        causal=causal,
        decay=0.1 if causal else None,
        begun=True,
        returned=True,
        dtype=torch.float32,
        backend="triton",
        batch=1,
    )
    expected = oracle(case)
    for got in pool(2, run, case):
        assert_right(got, expected, case.dtype)
