"""Documents' final states: the same bits on every rank, and what they cost to send."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

DOCUMENTS = [0, 37, 38, 38, 120, 200]


def some_ranks(cu_seqlens, ranks):
    """The last document's end is in the middle, and some ranks have nothing."""
    first, second = [(0, 0, 37), (3, 60, 82)], [(1, 0, 1), (3, 9, 60), (4, 30, 80)]
    rest = [(3, 0, 9), (4, 0, 30)]
    spans = [first, second, *[[]] * (ranks - 3), rest] if ranks > 2 else [first + rest, second]
    return Layout.from_spans(spans, cu_seqlens)


LAYOUTS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": lambda cu_seqlens, ranks: Layout.striped(cu_seqlens, ranks, 20),
    "some ranks": some_ranks,
}


@few_rows()
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_all_ranks_have_the_same_bits(causal, layout, transport):
    decay = 0.02 if causal else None
    for ranks, begun in itertools.product((2, 3, 4), (False, True)):
        case = LinearCase(LAYOUTS[layout](DOCUMENTS, ranks), causal, decay, begun=begun)
        case = dataclasses.replace(
            case, returned=True, batch=2, dtype=torch.float32, transport=transport
        )
        found = [result["state"] for result in virtual(ranks, run, case)]
        assert all(np.array_equal(x, found[0]) for x in found[1:]), (ranks, begun)
        assert_right({"state": found[0]}, {"state": oracle(case)["state"]}, case.dtype)


def test_the_rank_with_the_last_token_sends_them():
    """S a document to each other rank, in one message, besides what flows to later spans."""

    def sent(comm, layout):
        x = torch.zeros(layout.tokens_on(comm.rank), 2, 8)
        rows = LASP2Attention(comm).traffic(x, x, x, layout, return_state=True)
        return [row[2:] for row in rows if row.direction == "forward" and row.step == 1]

    state = 2 * 8 * 8 * 4
    documents = [0, 50, 60, 60, 100]
    ends = {"contiguous": [0, 1, 1, 1], "zigzag": [3, 0, 0, 0]}
    for kind, counts in ends.items():
        found = virtual(4, sent, LAYOUTS[kind](documents, 4))
        for rank, count in enumerate(counts):
            peers = [peer for peer in range(4) if peer != rank and count]
            assert found[rank] == [(peer, 1, count * state) for peer in peers], (kind, rank)
