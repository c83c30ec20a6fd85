"""What a call keeps is freed with it and its layout, without the collector of cycles."""

import dataclasses

import pytest
import torch

from seqpar import Layout, use_backend
from seqpar.attention.backend import current_backend
from tests.support.garbage import left_by
from tests.support.linear_cases import LinearCase, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


def train(comm, transport, causal):
    """Make a layout and a training call, and keep nothing of them."""
    layout = Layout.zigzag([0, 40, 90], comm.size)
    decay = 0.1 if causal else None
    case = LinearCase(layout, causal, decay, begun=True, returned=True)
    run(comm, dataclasses.replace(case, transport=transport, backend=current_backend("linear")))


@few_rows()
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_is_in_a_reference_cycle(causal, backend, transport):
    """Neither operands, states and gradients, nor routes and tables."""
    with use_backend(backend):
        types = [type(x) for x in left_by(virtual, 2, train, transport, causal)]
    assert not any(issubclass(left, torch.Tensor) for left in types)
    assert not any(left.__module__.startswith("seqpar") for left in types)
