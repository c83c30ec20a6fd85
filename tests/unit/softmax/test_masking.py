"""Calls with a mask of ranges: right in every strategy and backend, and refused by name."""

import pytest

from seqpar import Layout
from tests.support.cases import STRATEGIES, VARIANTS, Case, assert_right, oracle, run
from tests.support.mask_cases import disjoint_ranges
from tests.support.ranks import virtual

CU = [0, 23, 23, 60]
# Of two documents one is causal text with a bidirectional image, the other chunks and a first key
# that all see.
TEXT = ((0, 0, 23, 0, 23, None, 0), (0, 6, 15, 6, 15, 1, None))
CHUNKS = (
    *((2, 0, 12, 0, 12, None, 0), (2, 12, 24, 12, 24, None, 0), (2, 24, 37, 24, 37, None, 0)),
    (2, 12, 37, 0, 1, None, None),
)
LAYOUTS = {
    "zigzag": Layout.zigzag(CU, 4),
    "striped": Layout.striped(CU, 4, stripe=2),
    "contiguous": Layout.contiguous(CU, 4),
}


@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
def test_every_strategy_and_backend_equals_the_oracle(strategy, backend):
    kinds = list(LAYOUTS)
    for i, ranges in enumerate([TEXT + CHUNKS, disjoint_ranges(1, CU), disjoint_ranges(2, CU)]):
        case = Case(
            strategy,
            LAYOUTS[kinds[i]],
            causal=False,
            ranges=ranges,
            heads=4,
            kv_heads=2,
            sinks=bool(i),
            dlse=True,
            batch=2 if i else None,
            backend=backend,
        )
        expected = oracle(case)
        for got in virtual(4, run, case):
            assert_right(got, expected, case.dtype)
