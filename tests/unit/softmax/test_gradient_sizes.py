"""Gradients of out that are very small or very large, as loss scaling and long sums make them."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module, rms
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 30, 70], 3)
SIZES = {
    torch.float32: [1e-35, 1e-30, 1e-23, 1e22, 1e30],
    torch.float64: [1e-290, 1e-170, 1e170, 1e290],
}


def gradients(comm, strategy, size, dtype):
    q, k, v = local(LAYOUT, comm.rank, dtype=dtype)
    out = module(strategy, comm)(q, k, v, LAYOUT, causal=True)
    dout = local(LAYOUT, comm.rank, dtype=dtype, seed=1)[0].detach()
    dout[::5] = 0
    out.backward(dout * size)
    return [(x.grad.double() / size).numpy() for x in (q, k, v)]


@few_rows()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_gradients_are_proportional_to_douts_size(strategy, dtype):
    expected = virtual(3, gradients, strategy, 1.0, dtype)
    for size in SIZES[dtype]:
        for got, wanted in zip(virtual(3, gradients, strategy, size, dtype), expected, strict=True):
            for x, y in zip(got, wanted, strict=True):
                assert np.isfinite(x).all()
                assert rms(x - y) <= 32 * torch.finfo(dtype).eps * rms(y), size
