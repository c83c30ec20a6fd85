"""A document's bits do not depend on what else is in the pack."""

import pytest
import torch

from seqpar import Layout
from tests.support.cases import module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LENGTH = 1100  # so that each of two ranks has more than two tiles of rows of it


def of_document(comm, strategy, neighbour, causal):
    """out, dq, dk and dv of a document beside a neighbour of so many tokens."""
    layout = Layout.zigzag([0, LENGTH, LENGTH + neighbour], 2)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, neighbour)]
    q, k, v, dout = (
        layout.shard(
            torch.cat(
                [
                    torch.randn(n, 1, 8, generator=generator)
                    for n, generator in zip((LENGTH, neighbour), generators, strict=True)
                ]
            ),
            comm.rank,
        )
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(strategy, comm)(*leaves, layout, causal=causal)
    out.backward(dout)
    found = [out.detach(), *(x.grad for x in leaves)]
    return [layout.unshard(x, comm)[:LENGTH] for x in found]


@few_rows()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
def test_the_same_bits_whatever_the_neighbour(strategy, causal):
    alone = virtual(2, of_document, strategy, 1, causal)[0]
    for neighbour in (130, 1500):
        beside = virtual(2, of_document, strategy, neighbour, causal)[0]
        for x, y in zip(alone, beside, strict=True):
            assert torch.equal(x, y)
