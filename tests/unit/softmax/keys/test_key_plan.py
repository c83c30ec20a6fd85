"""Plans of steps: one order of exchanges on all ranks, steps left out, and halves of own work."""

import pytest
import torch

from seqpar import Layout
from tests.support.cases import STRATEGIES, Case, assert_right, oracle, run
from tests.support.ranks import virtual
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
