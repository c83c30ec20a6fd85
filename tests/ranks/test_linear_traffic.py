"""What linear attention sends, and when."""

import pytest
import torch

import seqpar
from seqpar import LASP2Attention, Layout
from tests.support.linear_cases import LinearCase


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
