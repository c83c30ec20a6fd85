"""Short convolutions and token shifts on virtual ranks: exact under every layout, both ways."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from seqpar import Layout, token_shift
from seqpar.halo import convolve
from tests.support.cases import rms
from tests.support.convolutions import ConvCase, conv_cases, oracle, run
from tests.support.linear_cases import assert_right
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@settings(max_examples=60, deadline=None)
@given(conv_cases(torch.float64))
def test_any_layout(drawn):
    ranks, case = drawn
    expected = oracle(case)
    for got in virtual(ranks, run, case):
        assert_right(got, expected, case.dtype)


LAYOUTS = {
    "zigzag": Layout.zigzag([0, 1, 1, 90, 200], 4),
    "stripes of 1": Layout.striped([0, 7, 103], 4, stripe=1),
    "three hops to the first token": Layout.from_spans(
        [[(0, 0, 1), (0, 4, 5)], [(0, 1, 2)], [(0, 2, 3)], [(0, 3, 4), (0, 5, 9)]], 9
    ),
    "ranks with nothing": Layout.from_spans([[], [(0, 0, 9)], [], [(0, 9, 40)]], [0, 40]),
}


@few_rows()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(monkeypatch, layout, dtype):
    """In blocks of 8 rows too; the weight may be in fp32."""
    case = ConvCase(LAYOUTS[layout], batch=2, dtype=dtype, channels=16)
    if layout == "zigzag":
        monkeypatch.setattr(convolve, "_BLOCK", 1)
        case = dataclasses.replace(case, weight_dtype=torch.float32)
    assert_right(virtual(4, run, case)[2], oracle(case), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_one_rank(dtype):
    case = ConvCase(Layout.contiguous([0, 700, 1024], 1), dtype=dtype, channels=16)
    expected, alone = oracle(case), virtual(1, run, case)[0]
    for kind, ranks in ((Layout.zigzag, 8), (Layout.contiguous, 16)):
        got = virtual(ranks, run, dataclasses.replace(case, layout=kind([0, 700, 1024], ranks)))[0]
        for name, y in expected.items():
            assert rms(got[name] - y) <= 1.35 * rms(alone[name] - y), name


def test_same_bits_each_time():
    case = ConvCase(Layout.zigzag([0, 90, 200], 4), dtype=torch.float32)
    first, second = (virtual(4, run, case)[1] for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_shift_moves_every_bit():
    """NaN, infinities and −0 of a document reach no other one."""
    x = torch.tensor([torch.nan, -torch.inf, -0.0, 1.0, torch.inf, 2.0])[:, None]
    layout = Layout.striped([0, 2, 2, 6], 2, stripe=1)

    def shifted(comm):
        mine = token_shift(layout.shard(x, comm.rank), layout, comm)
        return layout.unshard(mine, comm)

    expected = torch.stack([torch.zeros(1), x[0], torch.zeros(1), *x[2:5]])
    assert (virtual(2, shifted)[0].view(torch.int32) == expected.view(torch.int32)).all()


def test_nan_stays_in_its_document():
    case = ConvCase(Layout.zigzag([0, 30, 60], 2), dtype=torch.float32)
    expected = virtual(2, run, case)[0]["out"]

    class Poisoned(ConvCase):
        def inputs(self):
            x, *others = ConvCase.inputs(self)
            x[10] = torch.nan
            return x, *others

    got = virtual(2, run, Poisoned(case.layout, dtype=torch.float32))[0]["out"]
    assert np.array_equal(got[14:], expected[14:]) and np.isnan(got[10:14]).all()
    assert np.array_equal(got[:10], expected[:10])
