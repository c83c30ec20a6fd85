"""Legitimate but rare values: huge windows, scales of any sign, sinks of ±∞, and gradients of out
that are very small or very large, as loss scaling and long sums make them."""

import sys

import numpy as np
import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from seqpar.comm.messages.comm import Comm
from tests.support.calls import assert_infinite_sinks_are_limits, local
from tests.support.cases import STRATEGIES, Case, assert_right, module, oracle, rms, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 30, 70], 2)
BACKENDS = pytest.mark.parametrize("backend", ["aten", "reference"])


def outputs(comm, options):
    """Out, lse and the gradients of one call."""
    q, k, v = local(LAYOUT, comm.rank)
    attn = make_attention("ring", comm)
    out, lse = attn(q, k, v, LAYOUT, causal=True, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"window_size": (sys.maxsize, 0)}, {}),
        ({"window_size": (2**31, 2**100)}, {}),
        ({"window_size": None, "softcap": None}, {}),
        ({"window_size": [None, None]}, {}),
        ({"window_size": (np.int32(5), None)}, {"window_size": (5, 0)}),
        ({"softcap": 1e39}, {}),
        (
            {"softcap": np.float32(2), "softmax_scale": np.float64(0.5)},
            {"softcap": 2.0, "softmax_scale": 0.5},
        ),
        ({"softmax_scale": torch.tensor(0.5)}, {"softmax_scale": 0.5}),
    ],
    ids=str,
)
def test_other_ways_to_say_the_same(options, same):
    for got, expected in zip(virtual(2, outputs, options), virtual(2, outputs, same), strict=True):
        assert all(map(torch.equal, got, expected))


def test_causal_is_a_bool_of_numpy_too():
    q = torch.zeros(LAYOUT.tokens_on(0), 2, 8)
    attn = make_attention("ring", Comm("silent", 0, 2))
    assert attn.unsupported(q, q, q, LAYOUT, causal=np.bool_(True)) is None


@few_rows()
@BACKENDS
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 1e-30, -3e-38])
def test_scales_of_any_sign(strategy, scale, backend):
    """Under masks, which ATen applies before it scales."""
    for dtype in (torch.float64, torch.float32):
        for options in ({"causal": True}, {"causal": False, "window": (3, 5)}):
            case = Case(strategy, LAYOUT, scale=scale, dlse=True, backend=backend, dtype=dtype,
                        **options)  # fmt: skip
            assert_right(virtual(2, run, case)[0], oracle(case), dtype)


@few_rows()
@BACKENDS
@pytest.mark.parametrize("softcap", [1e-30, 1e-6, 1e6, 1e29, 1e30, 1e38, 1e39, 1e300])
def test_softcaps_of_any_size(softcap, backend):
    case = Case("ring", LAYOUT, causal=True, softcap=softcap, dlse=True, backend=backend,
                dtype=torch.float32)  # fmt: skip
    assert_right(virtual(2, run, case)[0], oracle(case), case.dtype)


@few_rows()
@BACKENDS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_infinite_sinks_and_rows_without_keys(strategy, backend):
    with use_backend(backend):
        assert_infinite_sinks_are_limits(strategy, torch.float64)


OF_THREE = Layout.zigzag([0, 30, 70], 3)
SIZES = {
    torch.float32: [1e-35, 1e-30, 1e-23, 1e22, 1e30],
    torch.float64: [1e-290, 1e-170, 1e170, 1e290],
}


def gradients(comm, strategy, size, dtype):
    q, k, v = local(OF_THREE, comm.rank, dtype=dtype)
    out = module(strategy, comm)(q, k, v, OF_THREE, causal=True)
    dout = local(OF_THREE, comm.rank, dtype=dtype, seed=1)[0].detach()
    dout[::5] = 0
    out.backward(dout * size)
    return [(x.grad.double() / size).numpy() for x in (q, k, v)]


@few_rows(pairs=False)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_gradients_are_proportional_to_douts_size(strategy, dtype):
    expected = virtual(3, gradients, strategy, 1.0, dtype)
    for size in SIZES[dtype]:
        for got, wanted in zip(virtual(3, gradients, strategy, size, dtype), expected, strict=True):
            for x, y in zip(got, wanted, strict=True):
                assert np.isfinite(x).all()
                assert rms(x - y) <= 32 * torch.finfo(dtype).eps * rms(y), size
