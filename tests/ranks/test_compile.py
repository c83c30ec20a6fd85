"""Compiled calls: whole graphs, none again for the next batch, and checkpoints within them."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import seqpar
from seqpar import LASP2Attention, Layout, Mask
from tests.support import ping_pong
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.checkpointing import KINDS, assert_nothing_is_repeated, compared
from tests.support.linear_cases import LinearCase
from tests.support.ranks import hide_from_collector
from tests.support.tiers import quickly

pytestmark = pytest.mark.filterwarnings("ignore")
EXHAUSTIVE = pytest.mark.exhaustive
KEPT = "disaggregated+at keys+server"  # of which the layout says how much is kept


def warm_up(group):
    torch.compile(torch.sin, backend="aot_eager")(
        torch.ones(3, requires_grad=True)
    ).sum().backward()


@pytest.fixture(scope="module")
def pool(pool):
    """The pool, whose processes have the compiler imported, so that no test has to wait for it."""
    pool(2, warm_up)
    yield pool
    pool(2, hide_from_collector)


def compiled_and_eager(step, run, batches):
    """The largest difference of compiled results from eager ones, and how often `step` was compiled
    up to each batch. `run(function, batch)` returns the results of `step` or of what is compiled.
    """
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast, counts, worst = torch.compile(step, backend=counter, fullgraph=True), [], 0.0
    for batch in batches:
        pairs = zip(run(fast, batch), run(step, batch), strict=True)
        worst = max(worst, *(float((x - y).abs().max()) for x, y in pairs))
        counts.append(counter.frame_count)
    return worst, counts


def with_gradients(out, *operands):
    out.sum().backward()
    return [out.detach(), *(x.grad for x in operands)]


LENGTHS = (40, 56, 72, 104)


def compiled(group, strategy, **options):
    attn = module(strategy, group, **options)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sinks, slopes = torch.ones(2, dtype=torch.float64), torch.tensor([0.5, 0.1])

    def step(q, k, v, layout, prefix):
        options = {"window_size": (9, -1), "prefix_lens": prefix, "sinks": sinks}
        options["alibi_slopes"] = slopes
        return attn(q.sin(), k, v, layout, causal=True, **options).cos()

    def run(function, tokens):
        layout = Layout.zigzag([0, tokens // 3, tokens], ranks)
        q, k, v = local(layout, rank)
        return with_gradients(function(q, k, v, layout, torch.tensor([2, tokens // 5])), q, k, v)

    return compiled_and_eager(step, run, LENGTHS)


def linear_compiled(group):
    """Of linear attention, whose ranks check their calls."""
    lin, decay = LASP2Attention(group, check_ranks=True), torch.tensor([-0.1, -0.2])
    comm = lin._bound.comm

    def step(q, k, v, layout):
        out, state = lin(q.sin(), k, v, layout, log_decay=decay, return_state=True)
        return out.cos().sum() + state.cos().sum()

    def run(function, tokens):
        layout = Layout.zigzag([0, tokens // 3, tokens // 2, tokens], comm.size)
        parts = (layout.shard(x, comm.rank) for x in LinearCase(layout).inputs()[:3])
        q, k, v = (x.requires_grad_() for x in parts)
        return with_gradients(function(q, k, v, layout), q, k, v)

    return compiled_and_eager(step, run, LENGTHS)


class Block(torch.nn.Module):
    """Attention whose layout is an attribute, set anew for each batch."""

    def __init__(self, attn):
        super().__init__()
        self.attn, self.layout, self.rank = attn, None, attn.rank

    def forward(self, q, k, v):
        positions = self.layout.position_ids(self.rank)[:, None, None]
        out = self.attn(q + positions, k, v, self.layout, causal=True)
        return out + self.layout.shard(torch.arange(self.layout.tokens), self.rank)[:, None, None]


class Plain(Block):
    """One that says nothing of ranks itself, so that all ranks run the same program."""

    def forward(self, q, k, v):
        return self.attn(q.sin(), k, v, self.layout, causal=True).cos()


def attributes_compiled(group, kind):
    """Of a module that has the layout as an attribute."""
    block = Block(LASP2Attention(group) if kind == "lasp2" else module(kind, group))

    def run(function, cu):
        block.layout = Layout.zigzag(cu, dist.get_world_size(group))
        q, k, v = local(block.layout, block.rank)
        return with_gradients(function(q, k, v), q, k, v)

    packs = ([0, 13, 40], [0, 8, 56], [0, 9, 50, 60, 104], [0, 7, 8, 64], [0, 60, 128])
    return compiled_and_eager(block, run, packs)


def sdpa_compiled(group, in_context):
    """Of `seqpar.sdpa`, or of torch's own within `context_parallel`."""
    attn, ranks = module("ring", group), dist.get_world_size(group)

    def step(q, k, v, layout):
        if in_context:
            q = q.flatten(1).unflatten(1, (q.shape[1], -1))  # a method that torch has in Python
            out = F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True, enable_gqa=True)
        else:
            options = {"strategy": attn, "is_causal": True, "enable_gqa": True}
            out = seqpar.sdpa(q.sin(), k, v, layout, **options)
        return out.cos()

    def run(function, tokens):
        layout = Layout.zigzag([0, tokens // 3, tokens], ranks)
        q, k, v = local(layout, attn.rank)
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        with seqpar.context_parallel(None, layout, attn) if in_context else nullcontext():
            out = function(*heads_first, None if in_context else layout)
        return with_gradients(out, q, k, v)

    return compiled_and_eager(step, run, LENGTHS)


def padding_compiled(group):
    """Of a function that pads batches of other lengths, by more and less."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def step(x, layout):
        return layout.shard(x, rank, value=-100), layout.padding(rank).int()

    def run(function, batch):
        tokens, multiple_of = batch
        layout = Layout.zigzag([0, 9, tokens], ranks, equal=True, multiple_of=multiple_of)
        found = function(torch.arange(tokens), layout)
        assert found[0].numel() == layout.tokens_on(rank)
        return found

    return compiled_and_eager(step, run, ((50, 8), (61, 16), (80, 3), (33, 1), (98, 50)))


def windows_compiled(group):
    """Of ten windows, and packs of as many tokens but other documents."""
    attn, ranks = module("ring", group), dist.get_world_size(group)

    def step(q, k, v, layout, left):
        return attn(q, k, v, layout, causal=True, window_size=(left, 0))

    def run(function, left):
        layout = Layout.contiguous([0, *range(3 + left, 30, 4), 64], ranks)
        return [function(*local(layout, attn.rank), layout, left)]

    return compiled_and_eager(step, run, (5, -1, 0, 1, 2, 3, 7, 9, 11, 13))


def masks_compiled(group):
    """Of masks of ranges, a new one for each batch, with the largest scores."""
    attn, ranks = module("ring", group), dist.get_world_size(group)

    def step(q, k, v, layout, mask):
        out, largest = attn(q.sin(), k, v, layout, mask=mask, return_max_logits=True)
        return out.cos() + largest[:, None]

    def run(function, tokens):
        layout = Layout.zigzag(tokens, ranks)
        blocks = [(0, i, i + 9, i, i + 9, 1, None) for i in range(0, tokens - 20, 10)]
        mask = Mask.of_ranges([(0, 0, tokens, 0, tokens, None, 0), *blocks])
        q, k, v = local(layout, attn.rank)
        return with_gradients(function(q, k, v, layout, mask), q, k, v)

    return compiled_and_eager(step, run, LENGTHS)


def made_inside(group, fullgraph):
    """The largest difference of gradients where layouts are made inside of what is compiled."""
    torch._dynamo.reset()
    attn, ranks, rank = module("ring", group), dist.get_world_size(group), dist.get_rank(group)

    def step(q, k, v, cu):
        layout = Layout.zigzag(cu, ranks)
        spans = len(layout.spans(rank)) * (layout == layout)
        return attn(q.sin(), k, v, layout, causal=True).cos() * spans

    fast, worst = torch.compile(step, backend="aot_eager", fullgraph=fullgraph), 0.0
    for cu in ([0, 20, 40], [0, 8, 40], [0, 56]):
        layout, results = Layout.zigzag(cu, ranks), []
        for function in (fast, step):
            q, k, v = local(layout, rank)
            function(q, k, v, torch.tensor(cu)).sum().backward()
            results += [torch.cat([q.grad.flatten(), k.grad.flatten(), v.grad.flatten()])]
        worst = max(worst, float((results[0] - results[1]).abs().max()))
    return worst


def refused(group):
    message = r"Layout\.zigzag cannot be traced: call it outside"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        made_inside(group, True)


def exported(group, file):
    """Export a module with a layout as its attribute; its inputs and result on this rank."""
    block = Plain(module("ring", group))
    block.layout = Layout.contiguous([0, 9, 32], 2)
    inputs = tuple(x.detach() for x in local(block.layout, block.rank))
    program = torch.export.export(block, inputs)
    if block.rank == 0:
        torch.export.save(program, file)
    return inputs, block(*inputs)


def loaded(group, file, inputs):
    """What a program gives on this rank that another process has exported; it needs the module."""
    attn = module("ring", group)
    return torch.export.load(file).module()(*inputs[attn.rank])


def assert_compiled_once(results):
    for worst, counts in results:
        assert worst <= 1e-12
        # once, and once more with dynamic shapes
        assert counts[0] == 1 and counts[1] == counts[-1] <= 2


@pytest.mark.parametrize("strategy", quickly(*STRATEGIES, KEPT))
def test_compiles_whole_once_for_all_batches(pool, strategy):
    assert_compiled_once(pool(2, compiled, strategy))


def test_linear_attention_compiles_whole_once_for_all_batches(pool):
    assert_compiled_once(pool(2, linear_compiled))


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("strategy", "blocks", "kinds"),
    [
        ("ring", 2, tuple(KINDS)),
        *((strategy, 1, ("ours",)) for strategy in ("ulysses", "token_ring", "disaggregated")),
    ],
)
def test_compiled_checkpoints_repeat_neither_attention_nor_its_messages(
    pool, strategy, blocks, kinds
):
    assert_nothing_is_repeated(pool(2, compared, strategy, True, blocks, kinds))


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("blocks", "kinds"),
    [
        (1, tuple(ping_pong.KINDS)),
        (2, ("ours",)),
    ],
)
def test_compiles_calls_in_two_parts_and_their_checkpoints(pool, blocks, kinds):
    ping_pong.assert_nothing_is_repeated(pool(2, ping_pong.compared, True, blocks, kinds))


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["ring", "lasp2"])
def test_a_layout_may_be_a_module_attribute(pool, kind):
    assert_compiled_once(pool(2, attributes_compiled, kind))


@EXHAUSTIVE
@pytest.mark.parametrize("in_context", [False, True])
def test_sdpa_compiles_whole_once_for_all_batches(pool, in_context):
    assert_compiled_once(pool(2, sdpa_compiled, in_context))


def test_padding_does_not_recompile(pool):
    assert_compiled_once(pool(2, padding_compiled))


def test_windows_and_documents_do_not_recompile(pool):
    for worst, counts in pool(2, windows_compiled):
        assert worst <= 1e-12 and counts[0] == 1 and counts[-1] <= 2


@EXHAUSTIVE
def test_masks_do_not_recompile(pool):
    assert_compiled_once(pool(2, masks_compiled))


@EXHAUSTIVE
def test_a_layout_made_inside_breaks_the_graph_correctly(pool):
    assert max(pool(2, made_inside, False)) <= 1e-12
    pool(2, refused)


def independent_calls(group):
    """For each graph of independent calls, whether each depends on the call before."""
    torch._dynamo.reset()
    softmax, linear, graphs = module("ring", group), LASP2Attention(group), []
    in_parts = module("disaggregated", group)

    def record(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    def branches(q, k, v, layout):
        outs = [softmax(x, k, v, layout, causal=True) for x in (q, q.sin())]
        outs.append(in_parts.finish(in_parts.begin(q, k, v, layout, causal=True)))
        outs.append(linear(q, k, v, layout))
        outs.append(seqpar.causal_conv1d(q.flatten(1), q.new_ones(16, 2), layout, group))
        return [x.sum() for x in outs]

    layout = Layout.zigzag([0, 20, 40], dist.get_world_size(group))
    sum(branches(*local(layout, dist.get_rank(group)), layout)).backward()
    return [follow_each_other(graph.graph) for graph in graphs]


def follow_each_other(graph):
    ancestors, calls = {}, []
    for node in graph.nodes:
        above = node.all_input_nodes
        ancestors[node] = set(above).union(*(ancestors[x] for x in above))
        if str(node.target).startswith("seqpar.") and node.target != torch.ops.seqpar.after.default:
            calls.append(node)
    return [first in ancestors[second] for first, second in itertools.pairwise(calls)]


def test_independent_calls_keep_their_order(pool):
    """Inductor orders independent operators by the sizes on its own rank."""
    assert pool(2, independent_calls) == [[[True] * 5] * 2] * 2


def backward_compiled(group):
    torch._dynamo.reset()
    attn, layout = module("ring", group), Layout.zigzag([0, 20, 40], dist.get_world_size(group))
    q, k, v = local(layout, dist.get_rank(group))
    whole = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(whole):
        attn(q, k, v, layout, causal=True).sum().backward()
    return q.grad is not None


@EXHAUSTIVE
def test_compiled_autograd_traces_a_whole_backward(pool):
    assert pool(2, backward_compiled) == [True, True]


def test_an_exported_program_loads_in_another_process(pool, tmp_path):
    """Rank 1 runs rank 0's program: the layout is in it, and each rank finds its own part."""
    results = pool(2, exported, tmp_path / "block.pt2")
    found = pool(2, loaded, tmp_path / "block.pt2", [inputs for inputs, _ in results])
    for (_, expected), out in zip(results, found, strict=True):
        assert torch.equal(out, expected)
