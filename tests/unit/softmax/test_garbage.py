"""What a call leaves to the garbage collector: nothing of ours, and no tensor."""

import pytest
import torch

import seqpar
from seqpar import Layout
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.garbage import left_by
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

# A training call leaves torch's own recursive closures, which hold neither tensors nor objects of
# ours: those with which it flattens the arguments of an operator that takes lists of tensors.
TORCHS = {"cell", "tuple", "GenericAlias"}


def train(comm, strategy, wrap, options):
    layout = Layout.zigzag([0, 30, 70], comm.size)
    q, k, v = local(layout, comm.rank, heads=4, kv_heads=2)
    options = options | {"sinks": torch.zeros(4, requires_grad=True), "causal": True}
    attn = module(strategy, comm)
    out, lse = wrap(lambda q: attn(q, k, v, layout, return_lse=True, **options), q)
    (out.sum() + lse.sum()).backward()


def plain(function, x):
    return function(x)


@few_rows(pairs=False)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [plain, seqpar.checkpoint])
def test_calls_and_layouts_are_freed_without_the_collector(strategy, wrap):
    for ranks, options in ((1, {}), (3, {}), (3, {"window_size": (9, 0), "softcap": 2.0})):
        for x in left_by(virtual, ranks, train, strategy, wrap, options):
            name = type(x).__name__
            assert name in TORCHS or x.__qualname__ == "tree_flatten.<locals>.helper", x


def test_what_is_left_is_found():
    def cycle():
        x = [torch.zeros(3)]
        x.append(x)

    assert any(isinstance(x, torch.Tensor) for x in left_by(cycle))
