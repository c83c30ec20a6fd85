"""What LASP-2 is compared with computes the same, and moves as many bytes as the model says."""

import pytest
import torch

from benchmarks.network.linear_contenders import CONTENDERS
from benchmarks.papers import linear_cost
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

TOKENS, HEADS, DIM = 150, 3, 16  # a rank; more than a chunk of the backend
STATE, BLOCK = HEADS * DIM * DIM * 4, 2 * TOKENS * HEADS * DIM * 4  # bytes, in fp32
LOG_DECAY = -torch.tensor([0.0, 0.002, 0.1])


def step(comm, name, backward):
    """What a rank computes, and the bytes that it sends."""
    generator = torch.Generator().manual_seed(comm.rank)
    q, k, v, dout = (torch.randn(1, TOKENS, HEADS, DIM, generator=generator) for _ in range(4))
    return CONTENDERS[name](comm, q, k, v, LOG_DECAY, dout if backward else None), comm.sent_bytes


def all_ranks(ranks, name, backward):
    return zip(*virtual(ranks, step, name, backward), strict=True)


@few_rows()
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["LASP-2 scan", "LASP-1", "Ring"])
def test_all_compute_the_same(name, ranks):
    for found, expected in zip(
        *(next(all_ranks(ranks, x, True)) for x in (name, "LASP-2 all_gather")), strict=True
    ):
        assert len(found) == 4
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


def test_data_parallel_is_each_rank_on_its_own():
    found, _ = all_ranks(2, "data parallel", True)
    first, _ = all_ranks(2, "LASP-1", False)
    torch.testing.assert_close(
        found[0][0], first[0][0]
    )  # the first rank's tokens see none of others
    assert not torch.allclose(found[1][0], first[1][0])


@pytest.mark.parametrize("name", CONTENDERS)
def test_bytes_are_those_of_the_model(name):
    ranks, parts = 4, linear_cost.passes(TOKENS, HEADS, DIM, itemsize=4)
    assert [(part.state, part.block) for part in parts] == [(STATE, BLOCK)] * 2
    _, forward = all_ranks(ranks, name, False)
    _, both = all_ranks(ranks, name, True)
    for rank in range(ranks):
        by_pass = [
            linear_cost.sent(name, rank, ranks, part, i == 1) for i, part in enumerate(parts)
        ]
        assert (forward[rank], both[rank]) == (by_pass[0], sum(by_pass))
    received = {
        "LASP-1": STATE,
        "LASP-2 scan": STATE,
        "LASP-2 all_gather": (ranks - 1) * STATE,
        "Ring": (ranks - 1) * BLOCK,
    }
    most = received.get(name, 0)  # by the last rank, of S, (P − 1) S or (P − 1) blocks
    per_rank = [
        most * rank // (ranks - 1) if name in ("Ring", "LASP-2 all_gather") else most * (rank > 0)
        for rank in range(ranks)
    ]
    assert sum(forward) == sum(per_rank)
