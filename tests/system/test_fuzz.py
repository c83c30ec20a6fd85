"""That the fuzzer passes right calls, notices wrong ones, and makes a call again by its number."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from seqpar.layout.masks.mask import Mask
from tests.support import cases, linear_cases
from tests.tools import faulty
from tests.tools.fuzz import attempt, draw, draw_linear, fuzz


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


def test_calls_are_the_same_each_time():
    (ranks, case), (again, same) = draw(3, 7), draw(3, 7)
    assert ranks == again and case.layout.spans(0) == same.layout.spans(0)
    assert dataclasses.replace(case, layout=None, kv_layout=None) == dataclasses.replace(
        same, layout=None, kv_layout=None
    )


@pytest.mark.parametrize("i", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_an_error_on_one_rank_reaches_all_ranks(i):
    """1 and 3 run passes in another order, 4 calls with a k of another dtype."""
    ranks, case = (draw_linear if i == 4 else draw)(0, i)
    program = faulty.draw_program(np.random.default_rng((0, i, 2)), ranks, case)
    assert faulty.faults_of(program, ranks) == []


def test_garbage_lateness_and_missing_errors_are_noticed():
    ranks, case = draw(0, 3)
    program = faulty.draw_program(np.random.default_rng(0), ranks, case)
    program = program._replace(faulty_rank=0, malformed="no layout")
    right = faulty.expected_on(program.cases[0], 1)
    for answer, what in (
        (({0: right}, None, 1.0), None),
        (({0: right | {"out": right["out"] + 1}}, None, 1.0), "out of call 0 is wrong"),
        (({0: right}, None, 10 * faulty.TIMEOUT), "took 80.0 s"),
        (({0: right}, (ValueError, "q"), 1.0), "got"),
    ):
        found = faulty.wrong_with(program, 1, answer, refused=False)
        assert (found is None) == (what is None) and (what is None or what in found)
    assert "no error" in faulty.wrong_with(program, 0, ({}, None, 1.0), refused=False)
