"""A scale that is learned, one for all heads or one a head: outputs are linear in it."""

import pytest
import torch

from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

SCALES = {"one": 0.3, "of heads": [0.3, -0.7, 0.0, 1.5], "zero": 0.0}


@few_rows()
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("causal", [True, False])
def test_its_gradient_is_that_of_a_linear_function(causal, scale):
    case = LinearCase(Layout.zigzag([0, 30, 70], 2), causal)

    def call(comm):
        q, k, v, dout = (case.layout.shard(x, comm.rank) for x in case.inputs()[:4])
        lin, options = LASP2Attention(comm), {"causal": causal}
        plain = lin(q, k, v, case.layout, **options)
        values = torch.tensor(SCALES[scale], dtype=torch.float64, requires_grad=True)
        scaled = lin(q, k, v, case.layout, scale=values, **options)
        scaled.backward(dout)
        products = (plain * dout).sum((0, 2))
        torch.testing.assert_close(scaled.detach(), plain * values.detach().reshape(-1, 1))
        torch.testing.assert_close(values.grad, products if values.dim() else products.sum())
        learned = values.detach().requires_grad_()
        assert lin.traffic(q, k, v, case.layout, scale=learned, **options)

    virtual(2, call)


def test_a_scale_without_gradient_is_a_number():
    case = LinearCase(Layout.contiguous(9, 1))

    def call(comm):
        q, k, v = case.inputs()[:3]
        lin = LASP2Attention(comm)
        as_tensor, as_number = (
            lin(q, k, v, case.layout, scale=scale) for scale in (torch.tensor(0.5), 0.5)
        )
        assert torch.equal(as_tensor, as_number)

    virtual(1, call)
