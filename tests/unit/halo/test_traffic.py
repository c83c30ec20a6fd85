"""What short convolutions send: by the docstring, by `traffic`, and by the messages themselves."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.comm.messages.exchange import Comm
from seqpar.halo.call import traffic
from seqpar.layout.geometry import Geometry
from tests.support.convolutions import ConvCase, call
from tests.support.ranks import virtual
from tests.support.steady import SilentComm, layouts
from tests.support.tiers import few_rows

LAYOUTS = layouts(stripe=1)


def sent(comm, case):
    """This rank's bytes and messages in forward, then in backward."""
    x, dout, weight, bias = case.inputs()
    x, dout = (case.layout.shard(y, comm.rank, 1) for y in (x, dout))
    counts = [(comm.sent_bytes, comm.sent_messages)]
    out = call(comm, case, x.requires_grad_(), weight, bias)
    counts.append((comm.sent_bytes, comm.sent_messages))
    out.backward(dout)
    counts.append((comm.sent_bytes, comm.sent_messages))
    return np.diff(counts, axis=0).tolist()


@few_rows()
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traffic_is_what_is_sent(layout, activation):
    for width in (1, 4, 30):
        case = ConvCase(
            LAYOUTS[layout], width, activation=activation, batch=2, dtype=torch.bfloat16
        )
        for rank, counted in enumerate(virtual(4, sent, case)):
            options = {"batch": 2, "activation": activation}
            rows = traffic(case.layout, rank, width, 5, case.dtype, **options)
            for direction, (size, messages) in zip(("forward", "backward"), counted, strict=True):
                of_pass = [row for row in rows if row.direction == direction]
                assert sum(row.bytes for row in of_pass) == size
                assert sum(row.messages for row in of_pass) == messages


def test_bytes_do_not_depend_on_the_length():
    """A rank of 1,024, whose neighbours get 3 rows; in backward in fp32 where there is SiLU."""
    row = 2 * 8192
    for tokens in (2**15, 2**20):
        for activation, element in ((None, 1), ("silu", 2)):
            layout = Layout.contiguous(tokens, 1024)
            rows = traffic(layout, 500, 4, 8192, torch.bfloat16, activation=activation)
            assert [x[:5] for x in rows] == [
                ("forward", 0, 501, 1, 3 * row),
                ("backward", 0, 499, 1, 3 * row * element),
            ]
            rows = traffic(Layout.zigzag(tokens, 1024), 500, 4, 8192, torch.bfloat16)
            found = {(x.direction, x.peer): x.bytes for x in rows}
            both = {(way, peer): 3 * row for way in ("forward", "backward") for peer in (499, 501)}
            assert found == both


def test_one_of_1024_ranks_sends_what_traffic_says():
    comm, layout = SilentComm(77, 1024), Layout.zigzag([0, 40000, 2**16], 1024)
    case = ConvCase(layout, batch=1, dtype=torch.float32)
    counted = sent(comm, case)
    rows = traffic(layout, 77, 4, 5, torch.float32, activation="silu")
    for direction, (size, messages) in zip(("forward", "backward"), counted, strict=True):
        assert size == sum(row.bytes for row in rows if row.direction == direction)
        assert messages == sum(row.messages for row in rows if row.direction == direction) <= 4
    assert isinstance(comm, Comm) and isinstance(layout.geometry, Geometry)


def test_documents_that_do_not_cross_ranks_send_nothing():
    layout = Layout.from_spans([[(0, 0, 9)], [(1, 0, 5), (2, 0, 4)]], [0, 9, 14, 18])
    assert all(not traffic(layout, rank, 4, 8, torch.float32) for rank in range(2))


def test_a_row_reaches_each_needing_rank_once():
    """Stripes of 1: each of the other 3 ranks needs every row but a few at the end."""
    layout = Layout.striped(400, 4, stripe=1)
    rows = traffic(layout, 0, 4, 1, torch.float32)
    assert [(x.direction, x.peer, x.bytes // 4) for x in rows] == [
        *[("forward", peer, 100) for peer in (1, 2, 3)],
        *[("backward", peer, 99) for peer in (1, 2, 3)],
    ]
