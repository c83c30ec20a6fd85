"""What a plan of steps decides: one order of exchanges on all ranks, and halves of own work."""

from dataclasses import dataclass

import pytest
import torch

from seqpar import Layout
from seqpar.strategies.ring import Ring
from tests.support.cases import STRATEGIES, Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.steady import SilentComm

# Rank 2 has nothing to do with rank 0, and each rank's own work is one slice, or several.
LAYOUT = Layout.from_spans(
    [[(0, 0, 9)], [(0, 9, 12), (1, 0, 20)], [(1, 20, 30), (2, 0, 7)], []], [0, 12, 42, 49]
)
HALVES = {
    "none first": Layout.zigzag([0, 20, 27, 39, 40], 3),
    "one token each": Layout.zigzag([0, 3], 3),
    "nothing on some": LAYOUT,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", HALVES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_halves_of_own_work_add_up(strategy, layout, causal):
    case = Case(strategy, HALVES[layout], causal, sinks=True, dlse=True)
    for result in virtual(case.layout.ranks, run, case):
        assert_right(result, oracle(case), torch.float64)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_all_ranks_plan_all_steps(strategy):
    """Also those in which nothing travels to a rank or from it: else its later exchanges would be
    posted in another order than its peers'."""

    def numbers(comm):
        attn, x = module(strategy, comm), torch.zeros(LAYOUT.tokens_on(comm.rank), 1, 8)
        call = attn._resolve(x, x, x, LAYOUT, causal=True)
        steps = attn._bound.strategy.plan(call).steps
        return [step.number for step in steps], [bool(step.to or step.source) for step in steps]

    (first, _), *others = found = virtual(4, numbers)
    assert all(other == first for other, _ in others)
    assert not all(all(travels) for _, travels in found)


@dataclass(frozen=True)
class Turning(Ring):
    """A ring that goes one way round or the other."""

    back: bool = False

    def distances(self, ranks):
        return super().distances(ranks)[:: -1 if self.back else 1]


def test_a_plan_is_that_of_a_strategys_options():
    """It is kept with the layouts, where other strategies and other options find theirs."""
    attn, x = module("ring", SilentComm(1, 4)), torch.zeros(LAYOUT.tokens_on(1), 1, 8)
    call = attn._resolve(x, x, x, LAYOUT, causal=False)
    plans = [strategy.plan(call) for strategy in (Turning(), Turning(back=True), Turning())]
    assert plans[0] is plans[2]
    one_way, other_way = ([step.source for step in plan.steps] for plan in plans[:2])
    assert one_way == other_way[::-1] != other_way
