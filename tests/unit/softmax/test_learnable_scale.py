"""A softmax scale that is learned, one for all heads or one a head: its gradient, and its error."""

import pytest
import torch

from seqpar import Layout
from tests.support.calls import local
from tests.support.cases import module, rms
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 30, 70], 2)
SCALES = {"one": 0.3, "of heads": [0.3, -0.7, 0.0, 1.5], "zero": 0.0}


def trained(comm, strategy, values, dtype=torch.float64):
    """Packed out and dq, and the scale's gradient, summed over the ranks."""
    q, k, v = local(LAYOUT, comm.rank, heads=4, dtype=dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor(values, dtype=exact, requires_grad=True)
    out = module(strategy, comm)(q, k, v, LAYOUT, causal=True, softmax_scale=scale)
    out.square().sum().backward()
    assert scale.grad.shape == scale.shape and out.dtype == q.dtype
    grad = torch.stack(comm.all_gather(scale.grad, label="test")).sum(0)
    return [*(LAYOUT.unshard(x.detach(), comm) for x in (out, q.grad)), grad]


def expected(values, dtype=torch.float64):
    """The same in fp64, from the definition, of the inputs in `dtype`."""
    whole = Layout.contiguous([0, 30, 70], 1)
    drawn = local(whole, 0, heads=4, dtype=dtype)
    q, k, v = (x.detach().double().requires_grad_() for x in drawn)
    scale = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    document = torch.arange(70) >= 30
    position = torch.arange(70)
    seen = (document[:, None] == document) & (position[:, None] >= position)
    scores = torch.einsum("nhd,md->hnm", q, k[:, 0]) * scale.reshape(-1, 1, 1)
    out = torch.einsum("hnm,md->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[:, 0])
    out.square().sum().backward()
    return [out.detach(), q.grad, scale.grad]


@few_rows()
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "token_ring"])
def test_its_gradient_is_the_oracles(strategy, name):
    for got in virtual(2, trained, strategy, SCALES[name]):
        for x, y in zip(got, expected(SCALES[name]), strict=True):
            assert torch.allclose(x, y, rtol=1e-11, atol=1e-11)


def test_half_precision_gradients_are_summed_in_fp32():
    got, wanted = (
        virtual(2, trained, "ring", SCALES["one"], torch.bfloat16)[0],
        expected(0.3, torch.bfloat16),
    )
    for x, y in zip(got, wanted, strict=True):
        assert rms((x.double() - y).numpy()) <= 0.02 * rms(y.numpy())


def test_a_scale_a_head_need_not_be_learned():
    def out_of(comm, scale):
        q, k, v = local(LAYOUT, comm.rank)
        return module("ring", comm)(q, k, v, LAYOUT, causal=True, softmax_scale=scale)

    scales = torch.tensor([0.3, 0.7])
    each = [virtual(2, out_of, scale)[1] for scale in (scales, 0.3, 0.7)]
    alone = torch.stack([each[1][:, 0], each[2][:, 1]], 1)
    assert torch.allclose(each[0], alone, rtol=1e-6, atol=1e-6)


def test_traffic_and_mask_area_take_it():
    def areas(comm):
        q, k, v = (x.detach() for x in local(LAYOUT, comm.rank))
        attn, scale = module("ring", comm), torch.ones(2, requires_grad=True)
        call = {"causal": True, "softmax_scale": scale}
        assert attn.traffic(q, k, v, LAYOUT, **call) and not attn.unsupported(
            q, k, v, LAYOUT, **call
        )
        return attn.mask_area(q, k, v, LAYOUT, **call).sum()

    assert virtual(2, areas)[0] == 2 * (30 * 31 + 40 * 41) // 2
