"""Which numbers calls get, and that a backward has its forward's, however its tensors are kept."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 9, 30], 2)
COPIED = saved_tensors_hooks(torch.clone, torch.clone)
PASSES = [(1, "forward"), (2, "forward"), (2, "backward"), (1, "backward")]


def attention(comm, strategy):
    if strategy in STRATEGIES:
        return module(strategy, comm)
    return seqpar.LASP2Attention(comm, transport=strategy)


def passes(comm, strategy, kept="plain"):
    """(number, pass) of two calls' exchanges, with the second call's backward first."""
    attn, found, post = attention(comm, strategy), [], comm.start

    def recording(sends, recvs, exchange):
        found.append((exchange.call, exchange.label.split(",")[0].split()[1]))
        return post(sends, recvs, exchange)

    attn._bound.comm.start = recording
    call = seqpar.checkpoint if kept == "checkpoint" else lambda function, *x: function(*x)
    outs = []
    with COPIED if kept == "copied" else nullcontext():
        for _ in range(2):
            inputs = local(LAYOUT, comm.rank, heads=4, kv_heads=2)
            outs.append(call(lambda *x: attn(*x, LAYOUT, causal=True), *inputs))
    for out in reversed(outs):
        out.sum().backward()
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "all_gather", "scan"])
def test_a_backward_has_the_number_of_its_forward(strategy):
    assert virtual(2, passes, strategy) == [PASSES] * 2


@few_rows()
@pytest.mark.parametrize("kept", ["copied", "checkpoint"])
@pytest.mark.parametrize("strategy", ["ulysses", "scan"])
def test_numbers_outlive_hooks_that_copy_and_checkpoints(strategy, kept):
    assert virtual(2, passes, strategy, kept) == [PASSES] * 2


def numbers(comm):
    attn, x = module("ring", comm), LAYOUT.shard(torch.arange(30.0), comm.rank).requires_grad_()
    inputs = local(LAYOUT, comm.rank)
    with pytest.raises(ValueError, match="q must have"):
        attn(inputs[0][1:], *inputs[1:], LAYOUT, causal=True)
    LAYOUT.unshard(x, comm).sum().backward()
    comm.all_gather(torch.ones(1), label="test")
    comm.all_gather_text("text", label="test")
    known = torch.tensor([7, 7])
    return [comm.call(x).numbers.own for x in (None, known, None)]


def test_refused_and_backward_calls_take_no_number():
    assert virtual(2, numbers) == [[4, 7, 5]] * 2


def test_two_ranks_count_their_common_calls():
    comm = Comm("three", 1, 3)
    forward = comm.call().numbers
    alone, other = comm.call().numbers, comm.call().numbers
    assert [other.between(0), forward.between(2), other.between(2)] == [1, 1, 2]
    backward = comm.call(forward.as_tensor()).numbers
    assert (backward.own, backward.between(2), backward.between(0)) == (1, 1, 2)
    assert (alone.own, alone.as_tensor().view(torch.int64).tolist()) == (2, [0, 2, 0])


def test_exchanges_outside_calls_have_number_0():
    numbers = Comm("two", 0, 2).numbers
    assert (numbers.own, numbers.between(1)) == (0, 0)
