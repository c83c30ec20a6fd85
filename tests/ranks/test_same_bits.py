"""deterministic="ranks" on real ranks; tests/unit/softmax has most of its cases."""

import pytest

from seqpar.softmax.keys import rank_invariant_plan
from tests.support.same_bits import bits, drawn_cases


def bits_of_short_tiles(group, case):
    """`bits`, with tiles of 16 queries."""
    length, rank_invariant_plan.TILE = rank_invariant_plan.TILE, 16
    try:
        return bits(group, case)
    finally:
        rank_invariant_plan.TILE = length


@pytest.mark.parametrize(
    "seed",
    [pytest.param(i, marks=() if i < 402 else pytest.mark.exhaustive) for i in range(400, 406)],
)
def test_random_calls_have_equal_bits_on_any_ranks(pool, seed):
    one, others = drawn_cases(seed)
    expected = pool(1, bits_of_short_tiles, one)[0]
    for case in others:
        assert all(x == expected for x in pool(case.layout.ranks, bits_of_short_tiles, case))
