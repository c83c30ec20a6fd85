"""What recurrent attention sends on up to 1,024 ranks, and how much it holds."""

import itertools
import time

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout, RecurrentAttention
from seqpar.comm.messages.comm import Comm
from seqpar.core import background
from seqpar.linear.maps.maps import Maps
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support.fakes import AtOnce, Held
from tests.support.ranks import virtual
from tests.support.recurrent_calls import RecurrentCall, begin
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows
from tests.unit.linear.test_final_states import DOCUMENTS, LAYOUTS

HEADS, DIM, VALUE_DIM = 8, 16, 32


def sent(transport, rank, ranks, state, size):
    """The bytes that a rank sends forward for one document in zigzag, from the docstring: the spans
    of all ranks in a row, of which the last rank's two are one."""
    spans = [*range(ranks), *reversed(range(ranks - 1))]  # who holds them
    mine = [i for i, holder in enumerate(spans) if holder == rank]
    if transport == "scan":
        return sum(state for i in mine if i + 1 < len(spans))
    if transport == "tree":
        steps = range((len(spans) - 1).bit_length())
        return sum(
            state if i < 2**d else size
            for i, d in itertools.product(mine, steps)
            if i + 2**d < len(spans) and spans[i + 2**d] != rank
        )
    last = {holder: i for i, holder in enumerate(spans) if holder != rank}
    return sum(
        (state if i == 0 else size) for i, end in itertools.product(mine, last.values()) if i < end
    )


def settings():
    for name, transport in itertools.product(("gated_delta", "vector_decay"), TRANSPORTS):
        for rank, ranks in ((0, 64), (31, 64), (512, 1024), (1023, 1024)):
            marks = () if name == "gated_delta" and ranks == 1024 else pytest.mark.exhaustive
            yield pytest.param(name, transport, rank, ranks, marks=marks)


@pytest.mark.parametrize(("name", "transport", "rank", "ranks"), list(settings()))
def test_bytes_are_those_of_the_docstring(name, transport, rank, ranks):
    layout = Layout.zigzag(16 * ranks, ranks)
    rec = RecurrentAttention(Comm("many", rank, ranks), name, transport)
    q, v, decay, beta = (
        torch.empty(1, 16, HEADS, *dims, dtype=torch.bfloat16, device="meta")
        for dims in ((DIM,), (VALUE_DIM,), (DIM,), ())
    )
    gates = {"log_decay": beta, "beta": beta} if name == "gated_delta" else {"log_decay": decay}
    with seqpar.use_backend("reference"):
        rows = rec.traffic(q, q, v, layout, **gates)
    state = HEADS * DIM * VALUE_DIM * 4
    size = state + HEADS * 4 * (DIM**2 if name == "gated_delta" else DIM)
    # Spans are the same from the other end, but for which of them is first.
    expected = sent(transport, rank, ranks, state, size)
    for direction in ("forward", "backward"):
        assert sum(row.bytes for row in rows if row.direction == direction) == expected


def counted(comm, call):
    """What was sent, and what `traffic` says, of forward and backward."""
    outputs, leaves = begin(comm, call)
    found = [comm.sent_bytes]
    torch.autograd.backward(*zip(*outputs.values(), strict=True))
    found.append(comm.sent_bytes - found[0])
    rec = RecurrentAttention(comm, call.kind, call.transport, blocks=call.blocks)
    given = {"layout": call.layout, "return_state": call.returned}
    rows = rec.traffic(**leaves, **given)
    ways = ("forward", "backward")
    return found, [sum(row.bytes for row in rows if row.direction == way) for way in ways]


@few_rows()
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traffic_says_what_is_sent(layout, transport):
    for ranks, some in itertools.product((2, 4), (False, True)):
        layout_of = LAYOUTS[layout](DOCUMENTS, ranks)
        call = RecurrentCall("gated_delta", layout_of, transport, begun=some, returned=some)
        for found, expected in virtual(ranks, counted, call):
            assert found == expected, (ranks, some)


# How many maps rank 3 holds at most besides its own, for one document on 8 and on 64 ranks.
@pytest.mark.parametrize(("transport", "most"), [("scan", (2.2, 2.2)), ("tree", (6.6, 6.6))])
def test_memory_of_an_exchange_is_independent_of_ranks(monkeypatch, transport, most):
    monkeypatch.setattr(background, "threads", AtOnce)
    for ranks, bound in zip((8, 64), most, strict=True):
        layout = Layout.contiguous(2**14, ranks)
        rec = RecurrentAttention(SilentComm(3, ranks), "gated_delta", transport)
        q = torch.empty(layout.tokens_on(3), 4, 32, device="meta")
        gate = torch.empty(layout.tokens_on(3), 4, device="meta")
        with seqpar.use_backend("reference"):
            call = rec._resolve(q, q, q, layout, log_decay=gate, beta=gate)
        states = torch.empty(1, 1, 4, 32, 32, device="meta")
        maps = Maps(states, torch.empty_like(states))
        for _ in range(2):  # the first makes tables
            with Held(*maps) as held:
                exchange = rec._bound.strategy.exchange(rec._bound.comm, call, q.device, False)
                exchange.post(maps)
                exchange.wait()
        assert held.peak <= bound * call.map_bytes * 1.03, held.peak / call.map_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_short_documents_on_many_ranks(transport):
    """5,000 documents of 200 tokens on each of 64 ranks: maps go together, and finding out which
    takes seconds at most."""
    rank, ranks = 5, 64
    many, one = (Layout.zigzag(np.arange(n + 1) * 200, ranks) for n in (5000, 1))

    def traffic(layout):
        q = torch.empty(layout.tokens_on(rank), 1, 4, device="meta")
        beta = torch.empty(layout.tokens_on(rank), 1, device="meta")
        with seqpar.use_backend("reference"):
            rec = RecurrentAttention(Comm("many", rank, ranks), "delta", transport)
            return rec.traffic(q, q, q, layout, beta=beta)

    start = time.process_time()
    rows = traffic(many)
    assert time.process_time() - start < 4
    for row, alone in zip(rows, traffic(one), strict=True):
        assert row[:4] == alone[:4] and row.bytes == 5000 * alone.bytes
