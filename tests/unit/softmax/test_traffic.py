"""What the strategies send and when: windows, skipping, order, and balance."""

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout
from tests.support.cases import STRATEGIES, module, visible
from tests.support.ranks import virtual


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mask_area_is_what_each_rank_computes(strategy):
    layout = Layout.striped([0, 30, 31, 90], 4, 4)

    def areas(comm):
        q, k = (
            torch.zeros(layout.tokens_on(comm.rank), 6, 8),
            torch.zeros(layout.tokens_on(comm.rank), 3, 8),
        )
        sent = comm.sent_bytes
        area = module(strategy, comm).mask_area(q, k, k, layout, causal=True, window_size=(20, -1))
        assert comm.sent_bytes == sent
        return area

    first, *others = virtual(4, areas)
    assert all(np.array_equal(first, other) for other in others)
    seen = visible(layout.cu_seqlens, layout.cu_seqlens, True, (20, -1), None)
    assert first.shape[0] == 4 and first.sum() == 6 * seen.sum()
    if strategy in ("ring", "all_gather", "token_ring"):
        owner = [layout.token_indices(rank).numpy() for rank in range(4)]
        axis = 1 if strategy == "token_ring" else 0
        by_rank = [seen.take(index, axis).sum() if axis else seen[index].sum() for index in owner]
        assert first.sum(1).tolist() == [6 * area for area in by_rank]


def test_zigzag_evens_out_what_contiguous_does_not():
    attn = module("ring", seqpar.comm.messages.comm.Comm("silent", 0, 4))
    worst = {}
    for make in (Layout.contiguous, Layout.zigzag):
        x = torch.zeros(256, 1, 8)
        area = attn.mask_area(x, x, x, make(1024, 4), causal=True)
        worst[make.__name__] = area.sum(1).max() / area.sum(1).mean()
    assert worst["zigzag"] < 1.01 and worst["contiguous"] > 1.7
