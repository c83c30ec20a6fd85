"""Shapes that the property tests do not reach: long documents and large head dims."""

import dataclasses

import pytest
import torch

from seqpar import Layout
from tests.support.cases import STRATEGIES, Case, assert_right, oracle, rms, run
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
