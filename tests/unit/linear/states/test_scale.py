"""What LASP-2 sends on up to 1,024 ranks, and how much it holds."""

import itertools
import time

import numpy as np
import pytest
import torch

from seqpar import LASP2Attention, Layout
from seqpar.comm.messages.comm import Comm
from seqpar.core import background
from tests.support.fakes import AtOnce, Held
from tests.support.steady import SilentComm


def transports_and_settings():
    settings = [(0, 64, 2**16), (31, 64, 2**22), (512, 1024, 2**20), (1023, 1024, 2**20)]
    for transport, (rank, ranks, tokens) in itertools.product(("all_gather", "scan"), settings):
        cheap = ranks < 1024 or transport == "scan"
        marks = () if cheap else pytest.mark.exhaustive
        yield pytest.param(transport, rank, ranks, tokens, marks=marks)


@pytest.mark.parametrize(("transport", "rank", "ranks", "tokens"), list(transports_and_settings()))
def test_lasp2_sends_states_only(transport, rank, ranks, tokens):
    """One document in zigzag: a state to each rank, or one for each of two spans, and so in
    backward, at any length."""
    lin, layout = LASP2Attention(Comm("many", rank, ranks), transport), Layout.zigzag(tokens, ranks)
    q = torch.empty(1, tokens // ranks, 8, 64, dtype=torch.bfloat16, device="meta")
    rows = lin.traffic(q, q, q, layout)
    # The last rank's two spans are one; nothing follows the first one's last.
    spans = 1 if rank in (0, ranks - 1) else 2
    states, messages = (ranks - 1, ranks - 1) if transport == "all_gather" else (spans, 4 * spans)
    for direction in ("forward", "backward"):
        of_pass = [row for row in rows if row.direction == direction]
        assert sum(row.bytes for row in of_pass) == states * 8 * 64 * 64 * 4
        assert sum(row.messages for row in of_pass) == messages


# One document on 8 ranks, of which this is number 3: how many states it has, and holds besides at
# most in forward and in backward, and in the end.
HELD = {
    ("contiguous", "all_gather"): (1, 3 + 1, 4 + 1, 1),  # what arrives, and the sums of it
    ("contiguous", "scan"): (1, 3, 3, 1),  # what it sends and receives, and the sums
    ("zigzag", "all_gather"): (2, 8 + 2, 8 + 2, 2),
    ("zigzag", "scan"): (2, 6, 6, 2),
}


@pytest.mark.parametrize(("layout", "transport"), HELD)
def test_an_exchange_holds_few_states(monkeypatch, layout, transport):
    monkeypatch.setattr(background, "threads", AtOnce)
    of_rank, *most, last = HELD[layout, transport]
    layout = getattr(Layout, layout)(2**14, 8)
    lin = LASP2Attention(SilentComm(3, 8), transport)
    q = torch.empty(layout.tokens_on(3), 4, 128, device="meta")
    call = lin._resolve(q, q, q, layout, log_decay=torch.zeros(4))
    states = torch.empty(of_rank, 1, 4, 128, 128, device="meta")
    for backward, bound in zip((False, True), most, strict=True):
        for _ in range(2):  # the first makes tables
            with Held(states) as held:
                exchange = lin._bound.strategy.exchange(lin._bound.comm, call, q.device, backward)
                exchange.post(states)
                sums = exchange.wait()
        counts = held.peak / call.state_bytes, held.now / call.state_bytes
        assert np.allclose(counts, (bound, last), rtol=0.03), (backward, counts)
        assert len(sums) == last


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_short_documents_on_many_ranks(transport):
    """5,000 documents of 200 tokens on each of 64 ranks: states go together, in as many messages as
    one document's, and finding out which takes a second."""
    rank, ranks, blocks = 5, 64, 4
    many, one = (Layout.zigzag(np.arange(n + 1) * 200, ranks) for n in (5000, 1))

    def traffic(layout):
        q = torch.empty(layout.tokens_on(rank), 1, 4, device="meta")
        return LASP2Attention(Comm("many", rank, ranks), transport, blocks).traffic(q, q, q, layout)

    start = time.process_time()
    rows = traffic(many)
    assert time.process_time() - start < 1
    part = 4 * 4 * 4 // (blocks if transport == "scan" else 1)  # of a state
    for row, alone in zip(rows, traffic(one), strict=True):
        assert row[:4] == alone[:4] and row.bytes == 5000 * alone.bytes and alone.bytes == part
