"""On gloo's processes, messages that are read are not overwritten by those posted later."""

import numpy as np
import pytest

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.keys import key_plan
from tests.support.cases import Case, run
from tests.support.poison import poisoned


def with_groups(group, case, poisons):
    """Return what this rank found, in groups of heads, and the exchanges that were wrong."""
    rows, key_plan._ROWS_PER_GROUP = key_plan._ROWS_PER_GROUP, 10
    try:
        if not poisons:
            return run(group, case), []
        with poisoned(Comm) as wrong:
            return run(group, case), list(map(str, wrong))
    finally:
        key_plan._ROWS_PER_GROUP = rows


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh"])
def test_what_is_read_is_not_overwritten(pool, strategy):
    case = Case(strategy, Layout.zigzag(121, 4), True, heads=4, kv_heads=4)
    plain = pool(4, with_groups, case, False)
    for (got, wrong), (expected, _) in zip(pool(4, with_groups, case, True), plain, strict=True):
        assert not wrong and all(map(np.array_equal, got, expected))
