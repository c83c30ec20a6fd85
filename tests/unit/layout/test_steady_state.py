"""From the second call on, tokens move between layouts without an upload or a read."""

import pytest
import torch

from seqpar import Layout
from tests.support.steady import DOCUMENTS, RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

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
