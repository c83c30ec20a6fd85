"""remap: tokens get to where another layout wants them, and just those that must. From the second
call on the host waits for nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.reshard import share
from tests.support.ranks import virtual
from tests.support.steady import DOCUMENTS, RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=6)
KINDS = st.sampled_from(["contiguous", "zigzag", "striped", "whole", "first"])


def layout_of(kind, cu, ranks):
    if kind == "striped":
        return Layout.striped(cu, ranks, 5)
    spans = [(i, 0, int(length)) for i, length in enumerate(np.diff(cu))]
    if kind == "whole":  # documents in turn
        return Layout.from_spans([spans[rank::ranks] for rank in range(ranks)], cu)
    if kind == "first":  # all on one rank
        return Layout.from_spans([spans] + [[]] * (ranks - 1), cu)
    return getattr(Layout, kind)(cu, ranks)


def moved(comm, one, two, dim):
    """What a rank holds in layout two, what comes back, its gradient, and the bytes it sent."""
    x = torch.randn(one.tokens, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.movedim(0, dim)
    local = one.shard(x, comm.rank, dim).requires_grad_()
    there = one.remap(local, two, comm, dim)
    sent = comm.sent_bytes
    back = two.remap(there.detach(), one, comm, dim)
    weights = x.exp()
    (there * two.shard(weights, comm.rank, dim)).sum().backward()
    assert torch.equal(there, two.shard(x, comm.rank, dim))
    assert torch.equal(back, local)
    assert torch.equal(local.grad, one.shard(weights, comm.rank, dim))
    return sent


@given(LENGTHS, KINDS, KINDS, st.integers(1, 4), st.sampled_from([0, 1, -1]))
def test_tokens_and_gradients_return_bit_for_bit(lengths, one, two, ranks, dim):
    cu = np.r_[0, np.cumsum(lengths)]
    one, two = (layout_of(kind, cu, ranks) for kind in (one, two))
    sent = virtual(ranks, moved, one, two, dim)
    for rank in range(ranks):
        held = [set(x.token_indices(rank).tolist()) for x in (one, two)]
        assert sent[rank] == len(held[0] - held[1]) * 3 * 8


def test_a_layout_to_itself_sends_nothing():
    layout = Layout.zigzag([0, 30, 100], 4)
    assert virtual(4, moved, layout, Layout.zigzag([0, 30, 100], 4), 0) == [0] * 4


def test_large_layouts_need_no_table_of_all_pairs():
    cu = np.arange(0, 50_001 * 20, 20)
    one, two = Layout.contiguous(cu, 512), Layout.zigzag(cu, 512)
    rows, counts = share(100, one.geometry, two.geometry)
    assert sum(counts) == one.tokens_on(100) == len(rows)


ONE, TWO = Layout.zigzag(20, 2), Layout.contiguous(20, 2)
WRONG = {
    "to": (lambda comm: ONE.remap(torch.ones(10), "zigzag", comm), "to must be a seqpar.Layout"),
    "documents": (
        lambda comm: ONE.remap(torch.ones(10), Layout.zigzag([0, 5, 20], 2), comm),
        "to must be a layout of the same documents",
    ),
    "ranks": (
        lambda comm: ONE.remap(torch.ones(10), Layout.zigzag(20, 3), comm),
        "to must have the layout's 2 ranks, got 3",
    ),
    "tokens": (lambda comm: ONE.remap(torch.ones(9), TWO, comm), "x_local must have 10 tokens"),
    "dim": (lambda comm: ONE.remap(torch.ones(10), TWO, comm, 1), "x_local must have 10 tokens"),
    "x_local": (lambda comm: ONE.remap([1.0] * 10, TWO, comm), "x_local must be a tensor"),
    "group": (lambda comm: ONE.remap(torch.ones(10), TWO, None), "group must be a process group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_nothing_is_sent(name):
    wrong, said = WRONG[name]

    def program(comm):
        with pytest.raises(ValueError, match=said):
            wrong(comm)
        return comm.sent_bytes

    assert virtual(2, program) == [0, 0]


LAYOUTS = layouts(stripe=16)
MOVES = {
    "unshard": lambda layout, x, comm: layout.unshard(x, comm),
    "remap": lambda layout, x, comm: layout.remap(x, Layout.zigzag(DOCUMENTS, RANKS), comm),
}


@few_rows()
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moving_waits_for_nothing(move, layout):
    for rank in (0, RANKS - 1):
        comm, layout_of = SilentComm(rank, RANKS), LAYOUTS[layout]
        x = torch.empty(layout_of.tokens_on(rank), 8, device="meta", requires_grad=True)
        second = HostWaits()
        MOVES[move](layout_of, x, comm).sum().backward()
        with second:
            MOVES[move](layout_of, x, comm).sum().backward()
        assert not second.found
