"""What a call keeps is freed with it and its layout, without the collector of cycles."""

import dataclasses
import gc

import pytest
import torch

from seqpar import Layout, use_backend
from seqpar.backend import current_backend
from tests.support.linear_cases import LinearCase, run
from tests.support.ranks import virtual


def train(comm, transport, causal):
    """Make a layout and a training call, and keep nothing of them."""
    layout = Layout.zigzag([0, 40, 90], comm.size)
    decay = 0.1 if causal else None
    case = LinearCase(layout, causal, decay, begun=True, returned=True)
    run(comm, dataclasses.replace(case, transport=transport, backend=current_backend()))


def in_cycles(function, *arguments):
    """Return the tensors and the objects of seqpar that only the collector would free."""
    function(*arguments)  # what is imported and made once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        function(*arguments)
        gc.collect()
        types = [type(x) for x in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return [t for t in types if issubclass(t, torch.Tensor) or t.__module__.startswith("seqpar")]


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_is_in_a_reference_cycle(causal, backend, transport):
    """Neither operands, states and gradients, nor routes and tables."""
    with use_backend(backend):
        assert in_cycles(virtual, 2, train, transport, causal) == []
