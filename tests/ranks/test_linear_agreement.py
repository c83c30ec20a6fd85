"""The rank check of linear attention: ranks whose calls disagree all raise the same error."""

import re

import pytest
import torch

from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase

LAYOUT = Layout.zigzag([0, 10, 24], 2)


def disagreeing(group, change, transport="all_gather"):
    """A call in which rank 1 differs; the error, as all ranks should see it."""
    rank = LASP2Attention(group).rank
    lin = LASP2Attention(group, transport if rank == 1 else "all_gather", check_ranks=True)
    q, k, v = (LAYOUT.shard(x, rank) for x in LinearCase(LAYOUT).inputs()[:3])
    call = {"log_decay": torch.tensor([-0.1, -0.2])} | (change if rank == 1 else {})
    try:
        lin(q, k, v, LAYOUT, **call)
    except ValueError as error:
        LASP2Attention(group)(q, k, v, LAYOUT)  # the group still works
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": None}, "log_decay must be the same on all ranks: rank 0 has \\[-0.1"),
        (
            {"return_state": True},
            "return_state must be the same on all ranks: rank 0 has False, rank 1 has True",
        ),
        ({"scale": float("nan")}, "scale must be finite, .*got nan \\(rank 1 of 2\\)"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_error(pool, change, message):
    first, second = pool(2, disagreeing, change)
    assert first == second
    assert re.search(message, first)


def test_ranks_that_differ_in_transport_are_told_so(pool):
    first, second = pool(2, disagreeing, {"log_decay": torch.tensor([-0.1, -0.2])}, "scan")
    assert first == second
    expected = "transport must be the same on all ranks: rank 0 has all_gather, rank 1 has scan"
    assert expected in first
