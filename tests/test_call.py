"""The call around the arithmetic: operators, compile, autocast, refusals, and the rank check."""

import copy
import gc
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist

import seqpar
from seqpar import Layout, make_attention, use_backend
from seqpar.comm import Comm
from tests.cases import STRATEGIES, Case, module, run
from tests.ranks import virtual


def local(layout, rank, heads=2, kv_heads=1, dim=8, dtype=torch.float64, seed=0):
    """This rank's q, k and v, which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    return [layout.shard(torch.randn(s, generator=generator, dtype=dtype), rank).requires_grad_() for s in shapes]


def compiled(group, strategy):
    """Compiled calls on several layouts: their largest difference from eager ones, and how often it compiled."""
    attn = module(strategy, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    sinks = torch.ones(2, dtype=torch.float64)

    def model(q, k, v, layout, prefix):
        return attn(q.sin(), k, v, layout, causal=True, window_size=(9, -1), prefix_lens=prefix, sinks=sinks).cos()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter, fullgraph=True)
    worst, counts = 0.0, []
    for tokens in (40, 56, 72, 104):
        layout, prefix = Layout.zigzag([0, tokens // 3, tokens], ranks), torch.tensor([2, tokens // 5])
        results = []
        for function in (fast, model):
            q, k, v = local(layout, rank)
            out = function(q, k, v, layout, prefix)
            out.sum().backward()
            results.append([out.detach(), q.grad, k.grad, v.grad])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
        counts.append(counter.frame_count)
    return worst, counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiles_whole_and_not_again_for_the_next_batch(pool, strategy):
    for worst, counts in pool(2, compiled, strategy):
        assert worst <= 1e-12
        assert counts[0] == 1 and counts[1] == counts[-1] <= 2  # once, and once more with dynamic shapes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operators_pass_opcheck(strategy):
    """torch's own checks of schema, fake tensors and autograd registration, on one virtual rank."""
    virtual(1, opcheck, strategy)


def opcheck(comm, strategy):
    attn = module(strategy, comm)
    layout = Layout.zigzag([0, 5, 12], 1)
    q, k, v = (x[None].detach().requires_grad_() for x in local(layout, 0, heads=4, kv_heads=2))
    parameters = attn._arguments(q, layout, causal=True, return_lse=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.seqpar.attention, (q, k, v, None, *parameters), test_utils=tests)


def test_backward_outlives_the_layout():
    def forward(comm):
        attn, layout = make_attention("ring", comm), Layout.zigzag(16, 1)
        q, k, v = local(layout, 0)
        out = attn(q, k, v, layout, causal=True)
        geometry = weakref.ref(layout.geometry)
        del attn, layout
        gc.collect()
        assert geometry() is not None
        out.sum().backward()
        assert q.grad.isfinite().all()
        del out
        gc.collect()
        return geometry() is None

    assert virtual(1, forward) == [True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lse_may_be_differentiated_on_some_ranks_only(strategy):
    """Where autograd has no gradient of lse, the others still count on what goes with it."""
    layout = Layout.zigzag([0, 30, 70], 4)

    def gradients(comm, on_all):
        q, k, v = local(layout, comm.rank, heads=4, kv_heads=2)
        out, lse = module(strategy, comm)(q, k, v, layout, causal=True, return_lse=True)
        loss = out.square().sum()
        if comm.rank == 1:
            loss = loss + lse.square().sum()
        elif on_all:
            loss = loss + 0 * lse.sum()
        loss.backward()
        return [q.grad, k.grad, v.grad]

    for some, every in zip(virtual(4, gradients, False), virtual(4, gradients, True), strict=True):
        assert all(torch.allclose(x, y, rtol=0, atol=1e-13) for x, y in zip(some, every, strict=True))


@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_casts_as_sdpa_does(strategy, backend):
    def forward(comm):
        layout = Layout.zigzag(64, comm.size)
        attn = module(strategy, comm)
        q, k, v = local(layout, comm.rank, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = attn(q, k, v, layout, causal=True, return_lse=True)
            exact = attn(q.double(), k.double(), v.double(), layout, causal=True)
        expected, expected_lse = attn(*(x.bfloat16() for x in (q, k, v)), layout, causal=True, return_lse=True)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and exact.dtype == torch.float64 and q.grad.dtype == torch.float32
        return torch.equal(out, expected) and torch.equal(lse, expected_lse)

    with use_backend(backend):  # it holds for the process, and so for the threads that play ranks
        assert virtual(2, forward) == [True, True]


def test_the_backend_of_forward_holds_for_backward(monkeypatch):
    from seqpar.backends import aten, reference

    def forward(comm):
        layout, used = Layout.zigzag(16, 1), []
        q, k, v = local(layout, 0)
        with use_backend("reference"):
            out = make_attention("ring", comm)(q, k, v, layout, causal=True)
        for backend in (aten, reference):
            original = backend.backward
            monkeypatch.setattr(backend, "backward", lambda *x, b=backend, f=original: (used.append(b), f(*x)))
        out.sum().backward()
        return used

    assert virtual(1, forward) == [[reference]]
    with pytest.raises(ValueError, match=r"backend must be one of .*'aten', .*got 'fast'"), use_backend("fast"):
        pass


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strided_gradient_and_strided_inputs(strategy):
    def forward(comm):
        layout = Layout.zigzag(24, comm.size)
        attn = module(strategy, comm)
        q, k, v = local(layout, comm.rank)
        attn(q, k, v, layout, causal=True).sum().backward()  # a gradient of stride 0
        expected = q.grad.clone()
        q.grad = None
        turned = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
        attn(*turned, layout, causal=True).sum().backward()
        return torch.allclose(q.grad, expected, rtol=0, atol=1e-13)

    assert virtual(2, forward) == [True, True]


def test_only_lse_may_be_differentiated():
    def forward(comm):
        layout = Layout.zigzag(12, 1)
        q, k, v = local(layout, 0)
        _, lse = make_attention("ring", comm)(q, k, v, layout, causal=False, return_lse=True)
        lse.sum().backward()
        scores = torch.einsum("nhd,md->hnm", q, k[:, 0]) * 8**-0.5
        (expected,) = torch.autograd.grad(scores.logsumexp(-1).sum(), q)
        return torch.allclose(q.grad, expected, rtol=0, atol=1e-13) and not v.grad.any()

    assert virtual(1, forward) == [True]


def test_differentiating_twice_is_refused():
    def forward(comm):
        layout = Layout.zigzag(8, 1)
        q, k, v = local(layout, 0)
        out = make_attention("ring", comm)(q, k, v, layout, causal=True)
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.sum().backward()

    virtual(1, forward)


def test_modules_are_copied_with_their_group_and_print():
    def build(comm):
        model = torch.nn.ModuleList([seqpar.RingAttention(comm), seqpar.UlyssesAttention(comm, check_ranks=True)])
        twin = copy.deepcopy(model)
        assert twin[0].engine is model[0].engine is seqpar.RingAttention(comm).engine
        assert "rank=0, ranks=1, check_ranks=True" in repr(model[1])

    virtual(1, build)


def unsharded(group, dim):
    layout, rank = Layout.striped([0, 5, 17], dist.get_world_size(group), stripe=2), dist.get_rank(group)
    x = torch.arange(17.0 * 3).reshape(17, 3)
    x = x.movedim(0, dim)
    part = layout.shard(x, rank, dim).requires_grad_()
    whole = layout.unshard(part, group, dim)
    weights = torch.arange(17.0).reshape([17 if i == dim % 2 else 1 for i in range(2)]) * (rank + 1)
    (whole * weights).sum().backward()
    expected = layout.shard(weights.expand_as(x) / (rank + 1), rank, dim) * 10  # 1 + 2 + 3 + 4
    return torch.equal(whole, x) and torch.equal(part.grad, expected)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_restores_the_pack_and_its_backward_sums_over_ranks(pool, dim):
    assert all(pool(4, unsharded, dim))


LAYOUT = Layout.zigzag([0, 10, 24], 2)
REFUSALS = [
    ({"q": (11, 2, 8)}, "q must have the 12 tokens its layout gives this rank, got 11 \\(rank 0 of 2\\)"),
    ({"k": (13, 1, 8)}, "k must have the 12 tokens"),
    ({"v": (13, 1, 8)}, "v must have the 12 tokens"),
    ({"q": (12, 8)}, "q must be \\(T, H, D\\)"),
    ({"k": (1, 12, 1, 8)}, "k must be .* like the others"),
    ({"q": (2, 12, 2, 8), "k": (3, 12, 1, 8), "v": (2, 12, 1, 8)}, "k must have q's batch size, 2, got 3"),
    ({"k": (12, 1, 4)}, "k must have q's head dim, 8, got 4"),
    ({"v": (12, 2, 8)}, "v must have k's number of heads, 1, got 2"),
    ({"k": (12, 3, 8), "v": (12, 3, 8)}, "q must have a multiple of k's 3 heads, got 2"),
    ({"k": (12, 0, 8), "v": (12, 0, 8)}, "k must have at least one head"),
    ({"q": torch.zeros(12, 2, 8, dtype=torch.float64)}, "k must be of q's dtype.* got torch.float32 beside torch.float64"),
    ({"q": torch.zeros(12, 2, 8, dtype=torch.int64)}, "q must be of q's dtype, one of"),
    ({"k": torch.zeros(12, 1, 8, device="meta")}, "k must be on q's device, cpu, got meta"),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    ({"kv_layout": Layout.zigzag(24, 2)}, "kv_layout must have layout's 2 documents, got 1"),
    ({"kv_layout": 5}, "kv_layout must be a seqpar.Layout"),
    ({"causal": 1}, "causal must be True or False, got 1"),
    ({"window_size": (-2, 0)}, "window_size.*at least -1, got -2"),
    ({"window_size": (3,)}, "window_size must be two integers"),
    ({"window_size": (3.5, 0)}, "window_size must be two integers"),
    ({"prefix_lens": [1]}, "prefix_lens must have one entry a document, 2, got 1"),
    ({"prefix_lens": [1, 15]}, "prefix_lens\\[1\\] must lie in 0 to 14"),
    ({"prefix_lens": [0.5, 1.0]}, "prefix_lens must be a 1-D sequence of integers"),
    ({"prefix_lens": torch.zeros(2)}, "prefix_lens must be a 1-D sequence of integers"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
    ({"softcap": -1.0}, "softcap must be finite and not negative"),
    ({"sinks": torch.zeros(3)}, "sinks must be \\(2,\\) floats"),
    ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks must be \\(2,\\) floats"),
    ({"sinks": torch.zeros(2, device="meta")}, "sinks must be on q's device"),
    ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(strategy, change, message):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    attn = module(strategy, comm)
    call = {"q": (12, 2, 8), "k": (12, 1, 8), "v": (12, 1, 8), "layout": LAYOUT, "causal": True} | change
    call |= {name: torch.zeros(call[name]) for name in "qkv" if isinstance(call[name], tuple)}
    with pytest.raises(ValueError, match=message):
        attn(**call)
    assert attn.unsupported(**call) is not None
    assert comm.sent_messages == 0
    good = {
        "q": torch.zeros(12, 2, 8),
        "k": torch.zeros(12, 1, 8),
        "v": torch.zeros(12, 1, 8),
        "layout": LAYOUT,
        "causal": True,
    }
    assert attn.unsupported(**good, return_lse=True, softcap=2.0) is None


def test_groups_and_names_are_checked():
    with pytest.raises(ValueError, match="group must be a process group"):
        seqpar.RingAttention(None)
    with pytest.raises(ValueError, match=r"name must be one of .*'ring', 'token_ring', 'ulysses', 'usp'\], got 'rings'"):
        make_attention("rings", None)
    layout = Layout.zigzag(8, 2)
    with pytest.raises(ValueError, match="group must have the layout's 2 ranks, got 3"):
        layout.unshard(torch.zeros(4), Comm("three", 0, 3))
    with pytest.raises(ValueError, match="x_local must have 4 tokens \\(rank 1's\\) along dim 0, got \\(5,\\)"):
        layout.unshard(torch.zeros(5), Comm("two", 1, 2))


def on_a_mesh(group):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    layout = Layout.zigzag(10, 2)
    rank = dist.get_rank(group)
    out = seqpar.RingAttention(mesh)(*local(layout, rank), layout, causal=True)
    return torch.equal(out, seqpar.RingAttention(group)(*local(layout, rank), layout, causal=True))


def test_a_device_mesh_is_a_group(pool):
    assert pool(2, on_a_mesh) == [True, True]


def disagreeing(group, strategy, change):
    """A call in which rank 1 differs, after one in which all agree; the error, as all ranks should see it."""
    attn = module(strategy, group, check_ranks=True)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout = Layout.zigzag([0, 10, 24], ranks)
    options = {"heads": 4, "kv_heads": 2, "dtype": torch.float32}
    attn(*local(layout, rank, **options), layout, causal=True).sum().backward()
    call = {"layout": layout, "causal": True}
    if rank == 1:
        options |= change.get("options", {})
        layout = change.get("layout", layout)
        call |= {"layout": layout} | change.get("call", {})
    q, k, v = local(layout, rank, **options)
    if rank == 1 and "cut" in change:
        q = q[1:]
    try:
        attn(q, k, v, **call)
    except ValueError as error:
        attn(*local(Layout.zigzag(12, ranks), rank), Layout.zigzag(12, ranks), causal=False)  # the group still works
        return str(error)
    return None


DISAGREEMENTS = {
    "causal": ({"call": {"causal": False}}, "causal must be the same on all ranks: rank 0 has True, rank 1 has False"),
    "window": ({"call": {"window_size": (3, 0)}}, "window_size must be the same on all ranks"),
    "scale": ({"call": {"softmax_scale": 0.1}}, "softmax_scale must be the same on all ranks"),
    "softcap": ({"call": {"softcap": 3.0}}, "softcap must be the same on all ranks"),
    "prefix": ({"call": {"prefix_lens": [1, 2]}}, "prefix_lens must be the same on all ranks"),
    "return_lse": ({"call": {"return_lse": True}}, "return_lse must be the same on all ranks"),
    "dtype": ({"options": {"dtype": torch.bfloat16}}, "dtype must be the same on all ranks"),
    "heads": ({"options": {"heads": 2}}, "heads of q must be the same on all ranks"),
    "layout": ({"layout": Layout.zigzag([0, 12, 24], 3)}, "layout must be the same on all ranks"),
    "one rank's tensor": ({"cut": True}, "q must have the 8 tokens its layout gives this rank, got 7 \\(rank 1 of 3\\)"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_the_same_error(pool, name):
    import re

    change, message = DISAGREEMENTS[name]
    errors = pool(3, disagreeing, "ring", change)
    assert len(set(errors)) == 1 and re.search(message, errors[0]), errors


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_strategy_checks_ranks(pool, strategy):
    errors = pool(3, disagreeing, strategy, DISAGREEMENTS["causal"][0])
    assert len(set(errors)) == 1 and "causal must be the same" in errors[0]


def test_more_ranks_than_heads_or_tokens():
    case = Case("ulysses", Layout.zigzag([0, 1, 3], 4), causal=True, heads=2, kv_heads=1)
    for got, other in zip(virtual(4, run, case)[3], virtual(4, run, Case("ring", case.layout, causal=True))[0], strict=True):
        assert abs(got - other).max() <= 1e-13
