"""How many of torch's operators a hop takes: they are most of the host's time."""

import pytest
import torch
from seqpar.kernels.flash_attention import launching
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar import Layout, use_backend
from seqpar.softmax.call import Operands
from seqpar.softmax.compute.partial import PartialGradients, cast_each
from tests.support.cases import module
from tests.support.steady import SilentComm


class Counted(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators(monkeypatch, strategy, layout, rank):
    """How many operators a rank calls in forward and in backward, from the second call on."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    attn, counts = module(strategy, SilentComm(rank, layout.ranks)), []
    q, k, v, dout = (
        torch.empty(1, layout.tokens_on(rank), heads, 16, dtype=torch.bfloat16, device="meta")
        for heads in (4, 2, 2, 4)
    )
    with use_backend("triton"):
        call, bound = attn._resolve(q, k, v, layout, causal=True), attn._bound
    operands = Operands(q, k, v)
    for _ in range(2):
        with Counted() as forward:
            out, lse, residuals = bound.strategy.forward(bound.comm.call(), call, operands)
        with Counted() as backward:
            kept = residuals or [q, k, v, out, lse]
            bound.strategy.backward(bound.comm.call(), call, dout, None, None, kept)
        counts = forward.count, backward.count
    return counts


# Of a hop of keys: the buffer that they arrive in, and its views as k and v; in backward also the
# gradients, their two views, the buffer that those of other ranks arrive in, and their addition. Of
# a visit: messages for queries and results, both ways, their views, the rows that are selected, and
# the merge, or the sum.
HOPS = {"ring": (3, 9), "token_ring": (19, 18)}


@pytest.mark.parametrize("strategy", HOPS)
def test_a_hop_takes_few_operators(monkeypatch, strategy):
    few, many = (
        operators(monkeypatch, strategy, Layout.zigzag([0, 90, 256], ranks), ranks // 2)
        for ranks in (4, 8)
    )
    for most, *counts in zip(HOPS[strategy], few, many, strict=True):
        assert counts[1] - counts[0] <= 4 * most


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_steps_in_which_nothing_travels_take_none(monkeypatch, strategy):
    """Each document is on one rank."""
    few, many = (
        operators(monkeypatch, strategy, Layout.contiguous(range(0, 20 * ranks, 20), ranks), 1)
        for ranks in (4, 8)
    )
    assert few == many


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_of_backward_share_no_memory(dtype):
    q, k, v = (torch.zeros(2, 5, heads, 3, dtype=dtype) for heads in (4, 2, 2))
    total = PartialGradients.zeros(q, k, v)
    total.packed.fill_(1.0)
    results = cast_each([total.dq, total.dk, total.dv], dtype)
    assert all(x.is_contiguous() and x.dtype == dtype for x in results)
    assert len({x.untyped_storage().data_ptr() for x in results}) == 3
    assert [x.sum() for x in results] == [0, k.numel(), v.numel()]
