"""Compiled calls: whole graphs, none again for the next batch, and checkpoints within them."""

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist

from seqpar import LASP2Attention, Layout
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.checkpointing import assert_nothing_is_repeated, compared
from tests.support.linear_cases import LinearCase

pytestmark = pytest.mark.filterwarnings("ignore")
EXHAUSTIVE = pytest.mark.exhaustive


def warm_up(group):
    torch.compile(torch.sin, backend="aot_eager")(
        torch.ones(3, requires_grad=True)
    ).sum().backward()


@pytest.fixture(scope="module")
def pool(pool):
    """The pool, whose processes have the compiler imported, so that no test has to wait for it."""
    pool(2, warm_up)
    return pool


def compiled(group, strategy):
    """Compiled calls on several layouts: their largest difference from eager ones, and how often
    they were compiled."""
    torch._dynamo.reset()
    attn = module(strategy, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sinks = torch.ones(2, dtype=torch.float64)

    def step(q, k, v, layout, prefix):
        options = {"window_size": (9, -1), "prefix_lens": prefix, "sinks": sinks}
        return attn(q.sin(), k, v, layout, causal=True, **options).cos()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for tokens in (40, 56, 72, 104):
        layout, results = Layout.zigzag([0, tokens // 3, tokens], ranks), []
        prefix = torch.tensor([2, tokens // 5])
        for function in (fast, step):
            q, k, v = local(layout, rank)
            out = function(q, k, v, layout, prefix)
            out.sum().backward()
            results.append([out.detach(), q.grad, k.grad, v.grad])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


def linear_compiled(group):
    """The same of linear attention, whose ranks check their calls."""
    torch._dynamo.reset()
    lin, decay = LASP2Attention(group, check_ranks=True), torch.tensor([-0.1, -0.2])
    comm = lin._bound.comm

    def step(q, k, v, layout):
        out, state = lin(q.sin(), k, v, layout, log_decay=decay, return_state=True)
        return out.cos().sum() + state.cos().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for tokens in (40, 56, 72, 104):
        layout, results = Layout.zigzag([0, tokens // 3, tokens // 2, tokens], comm.size), []
        for function in (fast, step):
            parts = (layout.shard(x, comm.rank) for x in LinearCase(layout).inputs()[:3])
            q, k, v = (x.requires_grad_() for x in parts)
            loss = function(q, k, v, layout)
            results.append([loss.detach(), *torch.autograd.grad(loss, (q, k, v))])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


def assert_compiled_once(results):
    for worst, counts in results:
        assert worst <= 1e-12
        # once, and once more with dynamic shapes
        assert counts[0] == 1 and counts[1] == counts[-1] <= 2


@pytest.mark.parametrize(
    "strategy", ["ring", *(pytest.param(x, marks=EXHAUSTIVE) for x in STRATEGIES[1:])]
)
def test_compiles_whole_and_not_again_for_the_next_batch(pool, strategy):
    assert_compiled_once(pool(2, compiled, strategy))


def test_linear_attention_compiles_whole_and_not_again_for_the_next_batch(pool):
    assert_compiled_once(pool(2, linear_compiled))


@pytest.mark.parametrize(
    ("strategy", "blocks"),
    [("ring", 1), *(pytest.param(x, 2, marks=EXHAUSTIVE) for x in STRATEGIES)],
)
def test_compiled_checkpoints_repeat_neither_attention_nor_its_messages(pool, strategy, blocks):
    assert_nothing_is_repeated(pool(2, compared, strategy, True, blocks))
