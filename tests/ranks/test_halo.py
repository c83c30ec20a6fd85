"""Short convolutions between processes, and compiled."""

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist

from seqpar import Layout, PeerError, causal_conv1d, token_shift
from tests.support.convolutions import ConvCase, oracle, run
from tests.support.linear_cases import assert_right

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_between_processes(pool, layout):
    case = ConvCase(getattr(Layout, layout)([0, 3, 40, 90], 3), dtype=torch.float32)
    expected = oracle(case)
    for got in pool(3, run, case):
        assert_right(got, expected, case.dtype)


def compiled(group):
    """The largest difference between compiled and eager calls on layouts, and how often they were
    compiled."""
    torch._dynamo.reset()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def step(x, layout):
        out = causal_conv1d(x.sin(), weight, layout, group, activation="silu")
        return out + token_shift(x, layout, group).cos()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for tokens in (40, 56, 72, 104):
        layout, results = Layout.zigzag([0, tokens // 3, tokens // 2, tokens], ranks), []
        for function in (fast, step):
            x = torch.arange(3.0 * tokens).view(tokens, 3)
            x, weight.grad = layout.shard(x, rank).requires_grad_(), None
            function(x, layout).square().sum().backward()
            results.append([x.grad, weight.grad])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


@pytest.mark.exhaustive
def test_compiles_whole_once_for_all_batches(pool):
    for worst, counts in pool(2, compiled):
        assert worst < 1e-4 and counts[-1] == counts[1] <= 2


def mistaken(group):
    """What a rank is told where one shifts tokens and the other has a convolution as wide."""
    rank, layout = dist.get_rank(group), Layout.zigzag(24, 2)
    x = layout.shard(torch.zeros(24, 3), rank)
    try:
        if rank:
            token_shift(x, layout, group)
        else:
            causal_conv1d(x, torch.zeros(3, 2), layout, group)
    except PeerError as error:
        return str(error)
    return None


@pytest.mark.exhaustive
def test_ranks_that_call_other_functions_are_told_so(pool):
    for message in pool(2, mistaken):
        assert "of causal_conv1d forward" in message and "of token_shift forward" in message
    pool.restart()  # after a PeerError the group cannot be used
