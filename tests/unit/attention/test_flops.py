"""What torch's FlopCounterMode counts of attention calls."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seqpar import LASP2Attention, Layout
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 30, 70], 1)
MASKS = [{"causal": True}, {"causal": False}, {"causal": True, "window_size": (4, 0)}]
PAIRS = [30 * 31 // 2 + 40 * 41 // 2, 30**2 + 40**2, 5 * 70 - 2 * 10]


def counted(attn, q, k, v, **options):
    """FLOPs of forward and of backward."""
    with FlopCounterMode(display=False) as forward:
        out = attn(q, k, v, LAYOUT, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@few_rows()
@pytest.mark.parametrize(("mask", "pairs"), list(zip(MASKS, PAIRS, strict=True)), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_softmax_attention_counts_the_pairs_of_the_mask(strategy, mask, pairs):
    def count(comm):
        attn = module(strategy, comm)
        q, k, v = local(LAYOUT, 0, heads=4, kv_heads=2)
        assert counted(attn, q, k, v, **mask) == (4 * pairs * 4 * 8, 10 * pairs * 4 * 8)
        assert attn.mask_area(q, k, v, LAYOUT, **mask).sum() == 4 * pairs
        batch = (x.detach().expand(3, *x.shape).requires_grad_() for x in (q, k, v))
        assert counted(attn, *batch, **mask) == (12 * pairs * 4 * 8, 30 * pairs * 4 * 8)

    virtual(1, count)


def test_calls_in_two_parts_count_the_same():
    def count(comm):
        attn, found = module("disaggregated", comm), []
        q, k, v = local(LAYOUT, 0, heads=4, kv_heads=2)
        for call in (attn, lambda *x, **options: attn.finish(attn.begin(*x, **options))):
            found.append(counted(call, q, k, v, causal=True))
        assert found[0] == found[1]

    virtual(1, count)


def test_it_agrees_with_torchs_count_of_full_attention():
    def count(comm):
        q, k, v = local(LAYOUT, 0, heads=2, kv_heads=2)
        return counted(module("ring", comm), q, k, v[..., :4], causal=False)

    with FlopCounterMode(display=False) as torchs:
        for tokens in (30, 40):
            q, k = (torch.zeros(1, 2, tokens, 8, device="meta") for _ in "qk")
            v = torch.zeros(1, 2, tokens, 4, device="meta")
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert virtual(1, count)[0][0] == torchs.get_total_flops()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_count_their_own(strategy):
    """Counted under the operator, on several virtual ranks: modes are of one thread."""
    layout = Layout.zigzag([0, 30, 70], 4)

    def count(comm):
        q, k, v = local(layout, comm.rank, heads=4, kv_heads=2)
        attn = module(strategy, comm)
        with FlopCounterMode(display=False) as counter:
            attn(q, k, v, layout, causal=True)
        areas = attn.mask_area(q, k, v, layout, causal=True)
        return counter.get_total_flops(), 4 * areas[comm.rank].sum() * 8

    ranks = virtual(4, count)
    assert all(flops == expected for flops, expected in ranks)
    assert sum(flops for flops, _ in ranks) == 4 * 4 * PAIRS[0] * 8


def test_linear_attention_counts_products_with_states():
    def count(comm):
        return counted(LASP2Attention(comm), *local(LAYOUT, 0, heads=4, kv_heads=2))

    product = 2 * 70 * 8 * 8
    assert virtual(1, count) == [(product * (4 + 2), product * (2 * 4 + 3 * 2))]
