"""Shapes that the property tests do not reach: long documents, also beside others, and large head
dims."""

import dataclasses

import pytest
import torch

from seqpar import Layout
from tests.support.cases import STRATEGIES, Case, assert_right, module, oracle, rms, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@few_rows()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", [Layout.zigzag, Layout.striped, Layout.contiguous])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (True, (300, 0)), (False, (40, 900))]
)
def test_long_documents_in_tiles(strategy, layout, causal, window):
    """Long enough for the tiles, steps and joined pieces that the property tests' short documents
    do not reach."""
    options = {"heads": 1, "dim": 4, "value_dim": 4, "dlse": True, "window": window}
    case = Case(strategy, layout([0, 1500, 1530, 2600], 3), causal=causal, **options)
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype)


@few_rows()
@pytest.mark.parametrize("dims", [(33, 33), (80, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_head_dims_up_to_256(dims, dtype):
    case = Case(
        "ring",
        Layout.zigzag([0, 9, 70], 2),
        causal=True,
        dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        dlse=True,
    )
    expected, got = oracle(case), virtual(2, run, case)[0]
    if dtype == torch.float64:
        assert_right(got, expected, case.dtype)
    alone = virtual(1, run, dataclasses.replace(case, layout=Layout.contiguous([0, 9, 70], 1)))[0]
    for x, y, z in zip(got, expected, alone, strict=True):
        assert rms(x - y) <= 2 * rms(z - y) + 1e-12  # too few tokens for the rule's 1.35


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
