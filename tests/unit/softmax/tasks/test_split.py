"""Calls in two parts: the bits of whole calls, and messages that travel under other work."""

import pytest
import torch

from seqpar import Layout
from seqpar.softmax.softmax_operator import ATTENTION
from seqpar.softmax.tasks import split
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
def test_interleaved_calls_have_the_bits_of_whole_calls(strategy):
    for one, other in zip(
        virtual(2, trained, strategy, apart), virtual(2, trained, strategy, in_turns), strict=True
    ):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("backward", [False, True])
def test_one_calls_dispatch_overlaps_anothers_work(backward):
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


def test_a_call_is_checked_first_and_finished_once():
    virtual(2, refused)


def test_nothing_is_kept_of_calls_that_are_finished():
    virtual(2, trained, "disaggregated+at random+server", in_turns)
    assert not split._posted


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def leaves_and_arguments(comm):
    """The module, q, k, v and sinks that require gradients, and the operators' other arguments."""
    attn, layout = module("disaggregated", comm), Layout.zigzag([0, 5, 12], 1)
    q, k, v, sinks, *_ = Case("disaggregated", layout, causal=True, sinks=True).inputs()
    leaves = [x.clone().requires_grad_() for x in (q[None], k[None], v[None], sinks)]
    options = {"causal": True, "sinks": leaves[3], "return_lse": True}
    _, arguments, _ = attn._operator_inputs(*leaves[:3], layout, **options)
    return attn, layout, leaves, ATTENTION.arguments.flat(arguments)


def checked(comm):
    *_, (q, k, v, sinks), arguments = leaves_and_arguments(comm)
    begin, finish = torch.ops.seqpar.attention_begin, torch.ops.seqpar.attention_finish
    torch.library.opcheck(begin, (q, k, v, sinks, *arguments), test_utils=CHECKS)
    for check in CHECKS[1:]:  # the first makes each call twice
        (ticket,) = begin(q, k, v, sinks, *arguments)
        torch.library.opcheck(finish, (ticket, sinks, q, k, v, *arguments), test_utils=check)


def test_both_halves_pass_opcheck():
    """But for its check that runs a backward: that of half a call alone never ends."""
    try:
        virtual(1, checked)
    finally:
        split._posted.clear()  # what began alone


def in_a_graph(comm):
    attn, layout, leaves, _ = leaves_and_arguments(comm)

    def call(q, k, v, sinks):
        return attn.finish(attn.begin(q, k, v, layout, causal=True, sinks=sinks))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for function in (call, compiled):
        out = function(*leaves)
        yield [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.exhaustive
def test_both_halves_make_one_graph():
    eager, compiled = virtual(1, lambda comm: list(in_a_graph(comm)))[0]
    assert all(map(torch.equal, eager, compiled))
