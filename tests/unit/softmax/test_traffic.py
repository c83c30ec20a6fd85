"""What the strategies send and when: windows, skipping, order, and balance."""

import threading

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.softmax.backends import aten
from tests.support.calls import sent_bytes
from tests.support.cases import STRATEGIES, Case, module, visible
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag])
def test_a_windows_bytes_do_not_depend_on_length(strategy, layout):
    """What sees nothing, or is not seen, does not travel: bytes of a window layer do not grow with
    the sequence."""
    for ranks in (4, 8):
        sent = {}
        for tokens in (512, 1024):
            case = Case(
                strategy, layout(tokens, ranks), causal=True, window=(16, 0), heads=1, batch=1
            )
            sent[tokens] = virtual(ranks, sent_bytes, case)
        assert sent[512] == sent[1024] and sum(map(sum, sent[512])) > 0


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_narrow_window_needs_few_bytes(strategy, layout, ranks):
    """Against full attention, forward and backward, on the rank that sends most."""
    tokens, totals = 512, []
    for options in ({"causal": True, "window": (tokens // 16, 0)}, {"causal": False}):
        case = Case(strategy, layout(tokens, ranks), heads=1, batch=1, **options)
        totals.append(max(map(sum, virtual(ranks, sent_bytes, case))))
    assert 5 * totals[0] <= totals[1]


EVENTS = {
    "ring": ["post", "compute", "post", "compute", "compute"],
    "all_gather": ["post", "post", "compute", "compute", "compute"],
    "token_ring": ["post", "compute", "post", "compute", "post", "compute", "post", "compute"],
    "ulysses": ["post", "post", "compute", "post", "compute", "post"],
    # Own pairs, half of them; those of guests, whose results then return; the other half.
    "disaggregated+at keys": ["post", "compute", "compute", "post", "compute"],
}
# Gradients return; a part of the own block is computed behind the last that do.
BACKWARD_EVENTS = {
    "ring": EVENTS["token_ring"],
    "all_gather": ["post", "post", "compute", "compute", "post", "compute", "post", "compute"],
}


@few_rows()
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", EVENTS)
def test_exchanges_are_posted_before_the_overlapping_work(monkeypatch, strategy, backward):
    """Rank 0 of 3, all rows needed: each step's exchange is posted before the compute of the step
    before."""
    events = []  # (thread, what it did); a rank is a thread

    def call(comm):
        post = comm.start
        comm.start = lambda *messages: (
            events.append((threading.get_ident(), "post")),
            post(*messages),
        )[1]
        layout, q = Layout.contiguous(12, 3), torch.zeros(4, 6, 8, requires_grad=backward)
        out = module(strategy, comm)(q, q, q, layout, causal=False)
        if backward:
            events.append((threading.get_ident(), "backward"))
            out.sum().backward()
        return threading.get_ident()

    def logged(function):
        return lambda *arguments: (
            events.append((threading.get_ident(), "compute")),
            function(*arguments),
        )[1]

    monkeypatch.setattr(aten, "forward", logged(aten.forward))
    monkeypatch.setattr(aten, "backward", logged(aten.backward))
    first, *_ = virtual(3, call)
    mine = [what for thread, what in events if thread == first]
    expected = EVENTS[strategy]
    if backward:
        mine = mine[mine.index("backward") + 1 :]
        expected = BACKWARD_EVENTS.get(strategy, expected)
    assert mine == expected


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
    attn = module("ring", seqpar.comm.messages.exchange.Comm("silent", 0, 4))
    worst = {}
    for make in (Layout.contiguous, Layout.zigzag):
        x = torch.zeros(256, 1, 8)
        area = attn.mask_area(x, x, x, make(1024, 4), causal=True)
        worst[make.__name__] = area.sum(1).max() / area.sum(1).mean()
    assert worst["zigzag"] < 1.01 and worst["contiguous"] > 1.7
