"""Plans of steps: one order of exchanges on all ranks, steps left out, and halves of own work."""

from dataclasses import dataclass

import pytest
import torch

from seqpar import Layout
from seqpar.softmax.keys import plan
from seqpar.softmax.wire.row_messages import RowFormat
from seqpar.strategies.ring import Ring
from tests.support.cases import STRATEGIES, Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows

# Rank 2 has nothing to do with rank 0, and each rank's own work is one slice, or several.
LAYOUT = Layout.from_spans(
    [[(0, 0, 9)], [(0, 9, 12), (1, 0, 20)], [(1, 20, 30), (2, 0, 7)], []], [0, 12, 42, 49]
)
HALVES = {
    "none first": Layout.zigzag([0, 20, 27, 39, 40], 3),
    "one token each": Layout.zigzag([0, 3], 3),
    "nothing on some": LAYOUT,
}


@few_rows()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", HALVES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_halves_of_own_work_add_up(strategy, layout, causal):
    case = Case(strategy, HALVES[layout], causal, sinks=True, dlse=True)
    for result in virtual(case.layout.ranks, run, case):
        assert_right(result, oracle(case), torch.float64)


# Each document is on two or three of 7 ranks, so ranks take part in different steps.
SPARSE = Layout.from_spans(
    [
        [(0, 0, 4), (1, 0, 3), (2, 3, 9)],
        [(0, 4, 9), (3, 0, 5)],
        [(4, 0, 6)],
        [(1, 3, 8), (4, 6, 8)],
        [(2, 0, 3), (5, 2, 7)],
        [(5, 0, 2), (4, 8, 11)],
        [(3, 5, 8)],
    ],
    [0, 9, 17, 26, 34, 45, 52],
)


@few_rows()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "usp+token_ring", "usp+mesh"])
def test_ranks_that_skip_steps_agree_on_their_order(strategy, causal):
    """Virtual ranks compare the step of each message with that of the exchange it arrives in."""
    if strategy.startswith(("usp", "mesh")):
        layout = Layout.from_spans(
            [*(SPARSE.spans(rank) for rank in range(7)), []], SPARSE.cu_seqlens
        )
    else:
        layout = SPARSE
    case = Case(strategy, layout, causal, sinks=True, dlse=True)
    for result in virtual(layout.ranks, run, case):
        assert_right(result, oracle(case), torch.float64)


@pytest.mark.parametrize("strategy", ["ring", "token_ring"])
def test_steps_without_rows_are_left_out(strategy):
    def steps(comm):
        attn, x = module(strategy, comm), torch.zeros(SPARSE.tokens_on(comm.rank), 1, 8)
        call = attn._resolve(x, x, x, SPARSE, causal=False)
        if strategy == "ring":
            return [step.number for step in attn._bound.strategy.plan(call).steps]
        row = RowFormat((), torch.float32)
        tile, _ = attn._bound.strategy.plan(comm, call, [row], [row])
        return [hop.step for hop in tile.query_hops]

    assert virtual(7, steps) == [
        *([1, 3, 4, 6], [1, 2, 5, 6], [1, 3, 4, 6], [1, 2, 3, 4, 5, 6]),
        *([1, 3, 4, 6], [1, 2, 3, 4, 5, 6], [2, 5]),
    ]


def test_a_rank_that_may_relay_plans_all_steps():
    attn, x = module("ring", SilentComm(6, 7)), torch.zeros(SPARSE.tokens_on(6), 1, 8)
    call = attn._resolve(x, x, x, SPARSE, causal=False)
    steps = attn._bound.strategy.plan(call, every_step=True).steps
    assert [step.number for step in steps] == list(range(1, 7))
    assert [step.number for step in steps if step.travels] == [2, 5]


def test_slices_are_built_when_their_step_is_computed(monkeypatch):
    built = []
    of_ranks = plan.slices_between
    monkeypatch.setattr(plan, "slices_between", lambda *x: built.append(x[3]) or of_ranks(*x))
    attn, x = module("ring", SilentComm(3, 7)), torch.zeros(SPARSE.tokens_on(3), 1, 8)
    call = attn._resolve(x, x, x, SPARSE, causal=False)
    blocks = iter(attn._bound.strategy.plan(call).blocks.slices)
    assert built == []
    next(blocks), next(blocks)
    assert built == [3, 2]


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
    one_way, other_way = ([step.source for step in x.steps] for x in plans[:2])
    assert one_way == other_way[::-1] != other_way
