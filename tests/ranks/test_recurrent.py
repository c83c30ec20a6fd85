"""Recurrent attention on real ranks."""

import dataclasses
import re

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from torch.distributed.tensor import Shard, distribute_tensor

import seqpar
from seqpar import Layout, RecurrentAttention
from seqpar.strategies.recurrent import TRANSPORTS
from tests.ranks.test_dtensor import LAYOUT as TWO_ROWS
from tests.ranks.test_dtensor import meshes
from tests.support.linear_cases import assert_right
from tests.support.recurrent_calls import NAMES, RecurrentCall, begin, oracle, recurrent_calls, run
from tests.support.tiers import examples
from tests.unit.linear.maps.test_transports import is_refused

LAYOUT = Layout.zigzag([0, 40, 90], 2)


@examples(5, 40)
@given(drawn=recurrent_calls(torch.float64).filter(lambda drawn: not is_refused(drawn[1])))
def test_equals_the_recurrence(pool, drawn):
    ranks, call = drawn
    expected = oracle(call)
    for got in pool(ranks, run, call):
        assert_right(got, expected, call.dtype)


def disagreeing(group, change):
    """A call in which rank 1 differs; the error, as all ranks should see it."""
    rank = torch.distributed.get_rank(group)
    call = RecurrentCall(
        "gated_delta", LAYOUT, "tree", batched=False, module_options=(("check_ranks", True),)
    )
    try:
        begin(group, dataclasses.replace(call, **change) if rank == 1 else call)
    except ValueError as error:
        begin(group, call)  # the group still works
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "delta"}, "kind must be the same on all ranks: rank 0 has gated_delta, rank 1"),
        ({"transport": "scan"}, "transport must be the same on all ranks: rank 0 has tree, rank 1"),
        ({"returned": True}, "return_state must be the same on all ranks: rank 0 has False"),
        ({"options": (("v_heads", 4),)}, "heads of v must be the same on all ranks: rank 0 has 2"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_error(pool, change, message):
    first, second = pool(2, disagreeing, change)
    assert first == second
    assert re.search(message, first)


def compiled(group):
    """The largest difference of a compiled step from the same uncompiled; counts of graphs."""
    torch._dynamo.reset()
    rec = RecurrentAttention(group, "gated_delta", "tree", check_ranks=True)

    def step(q, k, v, log_decay, beta, layout):
        out, state = rec(q.sin(), k, v, layout, log_decay=log_decay, beta=beta, return_state=True)
        return out.cos().sum() + state.cos().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for tokens in (40, 56, 72, 104):
        layout, results = Layout.zigzag([0, tokens // 3, tokens // 2, tokens], rec.ranks), []
        inputs = RecurrentCall("gated_delta", layout, batched=False).case.tensors()[0]
        for function in (fast, step):
            parts = [layout.shard(x[0], rec.rank).clone().requires_grad_() for x in inputs]
            loss = function(*parts, layout)
            results.append([loss.detach(), *torch.autograd.grad(loss, parts)])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


@pytest.mark.exhaustive  # the compiler takes seconds to start
def test_compiles_whole_once_for_all_batches(pool):
    for worst, counts in pool(2, compiled):
        assert worst <= 1e-10
        assert counts[1] == counts[-1]


def sharded(group, kind):
    """The largest difference of a call with sharded heads from one with whole ones."""
    tokens, heads = meshes(group)
    rec, results = RecurrentAttention(tokens, kind), []
    options = (("q_heads", 2), ("k_heads", 2), ("v_heads", 4))
    case = RecurrentCall(kind, TWO_ROWS, batched=False, options=options).case
    plain = [x if x is None else TWO_ROWS.shard(x[0], rec.rank) for x in case.tensors()[0]]
    for place in (True, False):
        leaves = {}
        for name, x in zip(NAMES, plain, strict=True):
            if x is not None:
                x = x.clone()
                x = distribute_tensor(x, heads, [Shard(1)]) if place else x
                leaves[name] = x.requires_grad_()
        out, state = rec(**leaves, layout=TWO_ROWS, return_state=True)
        assert not place or out.placements == state.placements == (Shard(1),)
        (out.square().sum() + state.square().sum()).backward()
        found = [out, state, *(x.grad for x in leaves.values())]
        results.append([x.full_tensor() if place else x for x in found])
    return max(float((x - y).detach().abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.composes(
    "PyTorch",
    "recurrent attention takes the same DTensors",
    context=2,
    tensor=2,
    equal="out, state and gradients",
)
@pytest.mark.parametrize(
    "kind", ["gated_delta", "kda", pytest.param("linear", marks=pytest.mark.exhaustive)]
)
def test_it_takes_sharded_heads(pool, kind):
    assert max(pool(4, sharded, kind)) <= 1e-12


def events(group, call):
    with seqpar.trace() as trace:
        outputs, _ = begin(group, call)
        torch.autograd.backward(*zip(*outputs.values(), strict=True))
    return [(event.kind, event.what, event.start, event.stop) for event in trace.events]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_maps_are_posted_before_the_overlapping_work(pool, transport):
    """Also on a rank that only sends, as the first of a contiguous document does."""
    options = (("dtype", torch.float32), ("dim", 32), ("value_dim", 32), ("batch", 1))
    call = RecurrentCall("gated_delta", Layout.contiguous(3000, 2), transport, options=options)
    for found in pool(2, events, call):
        for what in ("recurrent forward", "recurrent backward"):
            flights = [x for x in found if x[:2] == ("flight", what)]
            maps, *rest = [x for x in found if x[:2] == ("compute", what)]
            assert flights and all(maps[3] <= flight[2] for flight in flights)
            gathered = transport == "all_gather"  # others are posted by a thread, beside the work
            latest = rest[0][2] if gathered else rest[-1][3]
            assert min(flight[2] for flight in flights) <= latest
