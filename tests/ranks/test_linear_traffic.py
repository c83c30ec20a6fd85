"""What linear attention sends, and when."""

import dataclasses

import numpy as np
import pytest
import torch

import seqpar
from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase
from tests.support.tiers import few_rows


def sent_by(group, case):
    lin = LASP2Attention(group, transport=case.transport)
    comm = lin._bound.comm
    q, k, v, dout = (case.layout.shard(x, comm.rank, 1).requires_grad_() for x in case.inputs()[:4])
    counts = [(comm.sent_bytes, comm.sent_messages)]
    out = lin(q, k, v, case.layout, return_state=case.returned)
    out = out[0] if case.returned else out
    counts.append((comm.sent_bytes, comm.sent_messages))
    out.backward(dout)
    counts.append((comm.sent_bytes, comm.sent_messages))
    return np.diff(counts, axis=0).tolist()


@few_rows()
@pytest.mark.parametrize("tokens", [64, 640])
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_bytes_do_not_depend_on_the_length(pool, transport, tokens):
    """S a state. Contiguous: to each later rank (all_gather) or the next (scan); zigzag: to each
    (all_gather), or 2 (scan)."""
    ranks, dtype = 4, torch.bfloat16
    case = LinearCase(Layout.contiguous(tokens, ranks), batch=2, transport=transport, dtype=dtype)
    state = 2 * case.kv_heads * case.dim * case.value_dim * 4
    sent = np.array(pool(ranks, sent_by, case))[:, :, 0]
    later = [3, 2, 1, 0] if transport == "all_gather" else [1, 1, 1, 0]
    assert (sent == np.stack([later, later[::-1]], 1) * state).all()
    zigzag = dataclasses.replace(case, layout=Layout.zigzag(tokens, ranks))
    sent = np.array(pool(ranks, sent_by, zigzag))[:, :, 0]
    # scan: the last rank's two chunks are one span, and the first rank's last chunk is the last of
    # all
    expected = [[3, 3]] * 4 if transport == "all_gather" else [[1, 1], [2, 2], [2, 2], [1, 1]]
    assert (sent == np.array(expected) * state).all()


def test_documents_that_do_not_cross_ranks_send_nothing(pool):
    """The second of three documents crosses; only its state travels, in one message, unless final
    states are wanted."""
    case = LinearCase(
        Layout.from_spans([[(0, 0, 9), (1, 0, 5)], [(1, 5, 20), (2, 0, 7)]], [0, 9, 29, 36]),
        batch=1,
    )
    state = case.kv_heads * case.dim * case.value_dim * 8
    assert pool(2, sent_by, case) == [[[state, 1], [0, 0]], [[0, 0], [state, 1]]]
    returned = dataclasses.replace(case, returned=True)
    assert [x[0][0] for x in pool(2, sent_by, returned)] == [2 * state, 2 * state]


def events(group, case):
    lin = LASP2Attention(group, transport=case.transport)
    q, k, v = (case.layout.shard(x, lin.rank).requires_grad_() for x in case.inputs()[:3])
    with seqpar.trace() as trace:
        lin(q, k, v, case.layout).sum().backward()
    return [(event.kind, event.what, event.start, event.stop) for event in trace.events]


@pytest.mark.parametrize("layout", [Layout.zigzag, Layout.contiguous])
def test_states_are_posted_before_the_overlapping_work(pool, layout):
    """Also on a rank that only sends, as the first of a contiguous document does."""
    case = LinearCase(layout(3000, 2), dtype=torch.float32, dim=32, value_dim=32)
    for found in pool(2, events, case):
        for what in ("lasp2 forward", "lasp2 backward"):
            (flight,) = [x for x in found if x[:2] == ("flight", what)]
            (wait,) = [x for x in found if x[:2] == ("wait", what)]
            states, local, _ = [x for x in found if x[:2] == ("compute", what)]
            assert states[3] <= flight[2] <= local[2] and local[3] <= wait[2]
