"""Plain torch.compile around public calls: it compiles none of seqpar's own work, and is quick."""

import inspect
import re
from functools import partial

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config

import seqpar
from seqpar import Layout, balance, make_attention
from seqpar.halo import functions as halo
from tests.support.cases import module
from tests.support.fakes import fake_group
from tests.support.ranks import virtual

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns when it compiles
LAYOUT = Layout.zigzag([0, 40, 96], 2)
Q = torch.ones(LAYOUT.tokens_on(0), 4, 16)
CAUSAL = {"causal": True}
SIZES = {"heads": 4, "head_dim": 16, "dtype": torch.float32}

# torch.compile traces these public functions, and breaks its graph at all others.
TRACED = {
    "causal_conv1d", "checkpoint", "context_parallel", "flash_attn_func", "flash_attn_varlen_func",
    "known_task", "make_attention", "merge", "save_attention", "sdpa", "token_shift", "trace",
    "use_backend",
}  # fmt: skip
PUBLIC = [
    seqpar, seqpar.balance, seqpar.layout.plot, seqpar.masks, seqpar.servers, seqpar.simulate,
    seqpar.integrations.flash_attn, seqpar.integrations.mask_functions,
]  # fmt: skip
CLUSTER, MODEL = balance.Cluster.preset("1x8-h100"), balance.Model.preset("llama-8b")
ROW_BYTES = balance.RowBytes.of(heads=4, kv_heads=4, head_dim=16)
SHORT, TOKENS = Q[:3], torch.arange(96)
NOT_TRACED = {  # by the name in the refusal: a function of a module, which returns the call
    "shift_labels": lambda _: partial(seqpar.shift_labels, TOKENS, [0, 40, 96]),
    "Layout.zigzag": lambda _: partial(Layout.zigzag, [0, 40, 96], 2),
    "causal": lambda _: partial(seqpar.masks.causal, [0, 40, 96], window=9),
    "best_mesh": lambda _: partial(seqpar.best_mesh, 4, q_heads=4, kv_heads=4),
    "plan": lambda _: partial(balance.plan, [4000, 300], CLUSTER, MODEL, capacity=8192),
    "place_homes": lambda _: partial(balance.place_homes, [40, 56], 2, row_bytes=ROW_BYTES),
    "traffic": lambda _: partial(halo.traffic, LAYOUT, 0, 3, 16, torch.float32),
    "BoundModule.traffic": lambda attn: partial(attn.traffic, Q, Q, Q, LAYOUT, **CAUSAL),
    "BoundModule.unsupported": lambda attn: partial(attn.unsupported, Q, Q, SHORT, LAYOUT),
    "Attention.mask_area": lambda attn: partial(attn.mask_area, Q, Q, Q, LAYOUT, **CAUSAL),
    "BoundModule.preparation": lambda attn: partial(attn.preparation, **SIZES, **CAUSAL),
    "Preparation.__call__": lambda attn: partial(attn.preparation(**SIZES, **CAUSAL), LAYOUT),
    "ShardedCache.__init__": lambda attn: lambda: seqpar.ShardedCache(attn, LAYOUT).length,
}


@pytest.fixture(autouse=True)
def cold():
    torch._dynamo.reset()


def compiled(function, counter):
    return torch.compile(lambda x: (x.sin(), function(), x.cos()), backend=counter)


@pytest.mark.parametrize("name", NOT_TRACED)
def test_a_call_that_is_not_traced_breaks_the_graph_once(name):
    with fake_group(0, 2) as group:
        call = NOT_TRACED[name](make_attention("ring", group))
        counter = torch._dynamo.testing.CompileCounter()
        _, result, _ = compiled(call, counter)(Q)
        assert str(result) == str(call())
        assert counter.frame_count <= 2
        torch._dynamo.reset()  # which forgets that `call` is not worth compiling
        whole = torch.compile(call, backend=counter, fullgraph=True)
        text = f"seqpar: {name} cannot be traced: call it outside of the compiled function"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(text)):
            whole()


@pytest.mark.parametrize("strategy", ["ring", "disaggregated", "usp"])
def test_a_module_that_is_made_in_a_compiled_function_breaks_the_graph_once(strategy):
    with fake_group(0, 2) as group:
        make = partial(module, strategy, group)
        counter = torch._dynamo.testing.CompileCounter()
        assert str(compiled(make, counter)(Q)[1]) == str(make())
        assert counter.frame_count <= 2
        text = "seqpar: attention modules are made outside of the graph"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            torch.compile(make, backend=counter, fullgraph=True)()


def test_public_functions_are_traceable_or_closed():
    names = {(room, name) for room in PUBLIC for name in room.__all__}
    functions = {name: getattr(room, name) for room, name in names}
    open_to_dynamo = {
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        if not getattr(function, "_torchdynamo_disable", False)
    }
    assert open_to_dynamo == TRACED


def broken(comm, kind):
    """Results and gradients of plain and compiled calls whose operator breaks the graph."""
    attn = module("disaggregated", comm, **({"keep": "server"} if kind == "keep" else {}))
    layout = Layout.zigzag([0, 5, 12], 1)

    def step(q, k, v):
        if kind == "keep":
            return attn(q.sin(), k, v, layout, causal=True).cos()
        begun = attn.begin(q.sin(), k, v, layout, causal=True)
        return attn.finish(begun).cos() + v.sin()

    counter = torch._dynamo.testing.CompileCounter()
    for function in (step, torch.compile(step, backend=counter)):
        leaves = [
            torch.linspace(-1, i, 12 * 32).view(12, 2, 16).requires_grad_() for i in (1, 2, 3)
        ]
        out = function(*leaves)
        yield [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    yield counter.frame_count


@pytest.mark.parametrize("kind", ["keep", pytest.param("halves", marks=pytest.mark.exhaustive)])
def test_an_operator_that_breaks_the_graph_is_not_compiled_itself(kind):
    plain, fast, frames = virtual(1, lambda comm: list(broken(comm, kind)))[0]
    assert all(map(torch.equal, plain, fast))
    assert frames <= 5  # around both operators of `halves`


def gradients(step):
    x = torch.linspace(-1, 1, 12 * 32).view(12, 2, 16).requires_grad_()
    step(x).backward()  # compiles backward
    loss = step(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


def retained(comm, donated):
    attn, layout = module("ring", comm), Layout.zigzag([0, 5, 12], 1)

    def step(x):
        return attn(x.sin(), x, x, layout, causal=True).cos().sum()

    with torch._functorch.config.patch(donated_buffer=donated):
        fast = torch.compile(step, backend="aot_eager", fullgraph=True)
        return [gradients(function) for function in (step, fast)]


@pytest.mark.exhaustive
def test_a_compiled_backward_runs_twice_unless_buffers_are_donated():
    plain, fast = virtual(1, lambda comm: retained(comm, donated=False))[0]
    assert torch.equal(plain, fast)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"set torch\._functorch\.config\.donated_buffer=False"):
        virtual(1, lambda comm: retained(comm, donated=True))


def merged(x):
    return seqpar.merge([x.sin(), x.cos()], [x.sum(-1), x[..., 0]])[0]


def test_merge_compiles_whole():
    fast = torch.compile(merged, backend="eager", fullgraph=True)
    assert torch.equal(fast(Q), merged(Q))
