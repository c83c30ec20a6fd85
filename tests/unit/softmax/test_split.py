"""Calls in two parts: the bits of whole calls, and messages that travel under other work."""

import pytest
import torch

from seqpar import Layout
from seqpar.softmax import split_operator
from tests.support.cases import Case, module
from tests.support.nccl import nccl
from tests.support.nccl_exchanges import Speeds
from tests.support.ranks import virtual

LAYOUTS = [Layout.contiguous([0, 9, 40], 2), Layout.zigzag([0, 7, 30, 31], 2)]
PLANS = ["disaggregated", "disaggregated+at keys", "disaggregated+at random+server"]


def batches(strategy, rank, **options):
    """The arguments of two calls, and gradients of their results."""
    options = {"causal": True, "heads": 4, "kv_heads": 2, "sinks": True, "dlse": True} | options
    for seed, layout in enumerate(LAYOUTS):
        q, k, v, sinks, dout, dlse = Case(strategy, layout, seed=seed, **options).inputs()
        leaves = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
        leaves.append(sinks.requires_grad_())
        yield leaves, layout, [layout.shard(x, rank) for x in (dout, dlse)]


def apart(attn, made):
    return [
        attn(q, k, v, layout, causal=True, sinks=sinks, return_lse=True)
        for (q, k, v, sinks), layout, _ in made
    ]


def in_turns(attn, made):
    begun = [
        attn.begin(q, k, v, layout, causal=True, sinks=sinks, return_lse=True)
        for (q, k, v, sinks), layout, _ in made
    ]
    return [attn.finish(x) for x in begun]


def trained(comm, strategy, calls):
    """Outputs of both calls, and gradients of one backward through both."""
    made = list(batches(strategy, comm.rank))
    outputs = [x for result in calls(module(strategy, comm), made) for x in result]
    torch.autograd.backward(outputs, [x for *_, gradients in made for x in gradients])
    return [x.detach() for x in outputs] + [x.grad for leaves, *_ in made for x in leaves]


@pytest.mark.parametrize("strategy", PLANS)
def test_calls_in_turns_have_the_bits_of_whole_calls(strategy):
    for one, other in zip(
        virtual(2, trained, strategy, apart), virtual(2, trained, strategy, in_turns), strict=True
    ):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("backward", [False, True])
def test_dispatch_of_one_call_travels_under_the_work_of_the_other(backward):
    """Where all work is at other ranks, so that a call alone waits for all of its messages."""
    strategy = "disaggregated+to next"

    def forward(comm, strategy, calls):
        calls(module(strategy, comm), list(batches(strategy, comm.rank)))

    def seconds(calls, **speeds):
        function = trained if backward else forward
        return max(nccl(2, function, strategy, calls, speeds=Speeds(**speeds))[1].now)

    compute, messages = (seconds(apart, **{x: 1.0}) for x in ("area", "rate"))
    speeds = {"area": 1.0, "rate": 2 * messages / compute}  # messages take half as long
    assert seconds(apart, **speeds) == pytest.approx(1.5 * compute, rel=0.05)
    assert seconds(in_turns, **speeds) < 1.4 * compute


def refused(comm):
    attn = module("disaggregated", comm)
    (q, k, v, _), layout, _ = next(batches("disaggregated", comm.rank))
    begun = attn.begin(q, k, v, layout, causal=True)
    attn.finish(begun)
    with pytest.raises(RuntimeError, match="must be finished just once"):
        attn.finish(begun)
    with pytest.raises(ValueError, match="begun must be what begin returned, got 3"):
        attn.finish(3)
    with pytest.raises(TypeError, match="colour"):
        attn.begin(q, k, v, layout, causal=True, colour=1)
    with pytest.raises(ValueError, match="k must have"):
        attn.begin(q, k[1:], v, layout, causal=True)


def test_a_call_is_finished_once_and_refused_before_it_begins():
    virtual(2, refused)


def test_nothing_is_kept_of_calls_that_are_finished():
    virtual(2, trained, "disaggregated+at random+server", in_turns)
    assert not split_operator._posted
