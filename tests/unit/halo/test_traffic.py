"""What short convolutions send: by the docstring, by `traffic`, and by the messages themselves."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.halo.functions import traffic
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


def test_one_of_1024_ranks_sends_what_traffic_says():
    comm, layout = SilentComm(77, 1024), Layout.zigzag([0, 40000, 2**16], 1024)
    case = ConvCase(layout, batch=1, dtype=torch.float32)
    counted = sent(comm, case)
    rows = traffic(layout, 77, 4, 5, torch.float32, activation="silu")
    for direction, (size, messages) in zip(("forward", "backward"), counted, strict=True):
        assert size == sum(row.bytes for row in rows if row.direction == direction)
        assert messages == sum(row.messages for row in rows if row.direction == direction) <= 4
    assert isinstance(comm, Comm) and isinstance(layout.geometry, Geometry)


def test_a_row_reaches_each_needing_rank_once():
    """Stripes of 1: each of the other 3 ranks needs every row but a few at the end."""
    layout = Layout.striped(400, 4, stripe=1)
    rows = traffic(layout, 0, 4, 1, torch.float32)
    assert [(x.direction, x.peer, x.bytes // 4) for x in rows] == [
        *[("forward", peer, 100) for peer in (1, 2, 3)],
        *[("backward", peer, 99) for peer in (1, 2, 3)],
    ]
