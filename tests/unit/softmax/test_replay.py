"""Passes that are replayed equal the passes of the code that was recorded.

A stand-in for FlashAttention-4 computes: the forward of the backend "aten" is not recorded, because
its steps depend on values.
"""

import dataclasses

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.softmax import replay
from seqpar.softmax.keys import key_plan
from seqpar.softmax.keys.key_strategy import KeyStrategy
from tests.support.cases import Case, backward, begin, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows
from tests.unit.softmax.backends.test_flash_attn import hopper, installed  # noqa: F401

pytestmark = pytest.mark.usefixtures("installed")
DOCUMENTS = [0, 40, 41, 90]
NOT_DETERMINISTIC = (("deterministic", False),)
INT8 = (("message_dtype", torch.int8), *NOT_DETERMINISTIC)


def case_of(strategy, **options):
    """Return a causal case on 4 ranks that a kernel of FlashAttention computes."""
    made = {"causal": True, "dtype": torch.bfloat16, "backend": "flash_attn"}
    made |= {"module_options": NOT_DETERMINISTIC, "layout": layout()}
    return Case(strategy, **made | options)


def layout(ranks=4):
    return Layout.zigzag(DOCUMENTS, ranks)


@pytest.fixture
def counted(monkeypatch):
    """Return the names of the methods of `KeyStrategy` that computed a group of heads."""
    calls = []
    for name in ("_attend", "_attend_backward"):
        method = getattr(KeyStrategy, name)

        def counting(*args, _method=method, _name=name):
            calls.append(_name)
            return _method(*args)

        monkeypatch.setattr(KeyStrategy, name, counting)
    return calls


@pytest.fixture
def recomputed(monkeypatch):
    """Return what `virtual` returns for 4 ranks without replays."""

    def run_code(*arguments):
        with monkeypatch.context() as changed:
            changed.setattr(replay, "_may_be_replayed", lambda call: False)
            return virtual(4, *arguments)

    return run_code


def in_turn(group, cases):
    return [run(group, case) for case in cases]


def of_seeds(case, seeds):
    return [dataclasses.replace(case, seed=seed) for seed in seeds]


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "usp", "usp+all_gather"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dlse": 1.0, "sinks": True, "batch": 2, "heads": 8, "kv_heads": 4},
        {"window": (9, 0), "dtype": torch.float16},
        {"scale": -0.5, "softcap": 2.0},
        {"kv_layout": Layout.contiguous([0, 20, 70, 70], 4), "causal": False},
    ],
)
def test_a_replay_has_equal_bits(strategy, options, counted, recomputed):
    case = case_of(strategy, **options)
    virtual(4, in_turn, of_seeds(case, [0, 1]))
    counted.clear()
    replayed = virtual(4, in_turn, of_seeds(case, [2, 3]))
    assert not counted
    for seed, found in zip([2, 3], zip(*replayed, strict=True), strict=True):
        expected = recomputed(run, dataclasses.replace(case, seed=seed))
        assert counted
        for x, y in zip(found, expected, strict=True):
            assert all(map(np.array_equal, x, y))


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("options", [NOT_DETERMINISTIC, INT8], ids=str)
def test_groups_of_heads_are_replayed(strategy, options, counted, recomputed, monkeypatch):
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 3)
    case = case_of(strategy, heads=4, kv_heads=4, module_options=options)
    virtual(4, in_turn, of_seeds(case, [0, 1]))
    counted.clear()
    found = virtual(4, run, case)
    assert not counted
    expected = recomputed(run, case)
    assert len(counted) > 2 * 4
    for x, y in zip(found, expected, strict=True):
        assert all(map(np.array_equal, x, y))


def test_backwards_of_several_replays_run_in_any_order(recomputed):
    def crossed(group, cases):
        calls = [begin(group, case) for case in cases]
        for outputs, _ in reversed(calls):
            backward(outputs)
        return [[x.grad.float().numpy() for x in leaves.values()] for _, leaves in calls]

    case = case_of("ring")
    virtual(4, in_turn, of_seeds(case, [0, 1]))
    found = virtual(4, crossed, of_seeds(case, [2, 3, 4]))
    expected = recomputed(crossed, of_seeds(case, [2, 3, 4]))
    for x, y in zip(found, expected, strict=True):
        for gradients, others in zip(x, y, strict=True):
            assert all(map(np.array_equal, gradients, others))


@pytest.mark.parametrize(
    "changed",
    [{"sinks": True}, {"dlse": 1.0}, {"alibi": "heads"}, {"softcap": 2.0}, {"window": (5, 0)}],
    ids=str,
)
def test_a_call_with_other_arguments_is_not_a_replay(changed, recomputed):
    case = case_of("ring")
    virtual(4, in_turn, of_seeds(case, [0, 1, 2]))
    other = dataclasses.replace(case, **changed)
    found = virtual(4, run, other)
    expected = recomputed(run, other)
    for x, y in zip(found, expected, strict=True):
        assert all(map(np.array_equal, x, y))


def test_operands_in_other_memory_are_not_a_replay(counted, recomputed):
    """Views of a joint projection have other strides and offsets than tensors of their own."""

    def called(group, case, joint):
        outputs, leaves = begin(group, case)
        if joint:
            k, v = torch.cat([leaves["k"], leaves["v"]], -1).chunk(2, -1)
            outputs, _ = begin(group, case, k=k, v=v)
        return outputs["out"][0].detach().float().numpy()

    case = case_of("ring")
    expected = recomputed(called, case, False)
    for _ in range(3):
        virtual(4, called, case, False)
    for _ in range(3):
        counted.clear()
        found = virtual(4, called, case, True)
        assert all(map(np.array_equal, found, expected))
    assert not counted
