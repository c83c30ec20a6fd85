"""That the fuzzer passes right calls, notices wrong ones, and makes a call again by its number."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from seqpar.layout.masks.mask import Mask
from tests.support import cases, linear_cases
from tests.tools.fuzz import attempt, draw, fuzz


def off_by_one(group, case, of=Mask.of):
    """The call, with a mask by which each query sees a key too many behind it, where there is a
    limit."""

    def shifted(*arguments):
        mask = of(*arguments)
        return dataclasses.replace(mask, right=mask.right + 1)

    with mock.patch.object(Mask, "of", shifted):
        return (linear_cases if isinstance(case, linear_cases.LinearCase) else cases).run(
            group, case
        )


def refused_by_one(group, case):
    if group.rank() == 1:
        raise ValueError("not here")


def accepted(group, case):
    """An answer to any call."""


@pytest.mark.parametrize(
    ("calls", "wrong"), [(10, 2), pytest.param(20, 5, marks=pytest.mark.exhaustive)]
)
def test_right_calls_pass_and_planted_faults_are_noticed(pool, calls, wrong):
    said = []
    assert fuzz(pool, 0, range(calls), say=said.append, faults=False) == 0
    assert not any("WRONG" in line for line in said) and "worst error" in "".join(said)
    assert fuzz(pool, 0, range(calls), off_by_one, said.append, faults=False) >= wrong
    assert any("is WRONG" in line and "errors over their bounds" in line for line in said)


def test_a_call_that_some_ranks_refuse_is_wrong(pool):
    kind, why = attempt(pool, *draw(0, 0), call=refused_by_one)
    assert kind == "wrong" and "ValueError: not here" in why


def test_what_must_be_refused_is(pool):
    drawn = (draw(0, i) for i in range(1000))
    keys = (
        (ranks, case, np.diff((case.kv_layout or case.layout).cu_seqlens)) for ranks, case in drawn
    )
    ranks, case = next(
        (ranks, case)
        for ranks, case, n in keys
        if case.prefix is not None and (case.prefix > n).all()
    )
    kind, why = attempt(pool, ranks, case)
    assert kind == "refused" and "prefix_lens[0] must lie in" in why
    kind, why = attempt(pool, ranks, case, call=accepted)
    assert kind == "wrong" and "not refused" in why
