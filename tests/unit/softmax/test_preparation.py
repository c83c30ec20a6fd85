"""Tables that another process builds ahead of time: the first call finds them."""

import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Layout, make_attention, use_backend
from seqpar.core import device_tables
from seqpar.costs import Cluster
from seqpar.layout import handle
from seqpar.softmax.strategy import Strategy
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.steady import RANKS, SilentComm, layouts
from tests.unit.softmax.test_uploads import ONE_COPY, copies

SIZES = {"heads": 16, "kv_heads": 8, "head_dim": 16, "dtype": torch.bfloat16, "device": "meta"}


@pytest.fixture
def elsewhere(monkeypatch):
    """Prepare a layout in another process: none of its tables are here before it is unpickled."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)

    def prepared(name, preparation):
        monkeypatch.setattr(handle, "_by_digest", weakref.WeakValueDictionary())
        pickled = pickle.dumps(preparation(layouts(stripe=4)[name]))
        monkeypatch.setattr(handle, "_by_digest", weakref.WeakValueDictionary())
        return pickle.loads(pickled)

    return prepared


@pytest.fixture
def rehearsals(monkeypatch):
    """The number of rehearsals so far, in a list."""
    found, run = [], Strategy.rehearse
    monkeypatch.setattr(Strategy, "rehearse", lambda *args: (found.append(1), run(*args))[1])
    return found


@pytest.mark.parametrize("name", ["zigzag", "uneven"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_call_finds_prepared_tables(strategy, name, elsewhere, rehearsals):
    attn = module(strategy, SilentComm(1, RANKS))
    with use_backend("triton"):
        preparation = pickle.loads(pickle.dumps(attn.preparation(**SIZES, causal=True)))
        layout = elsewhere(name, preparation)
        rehearsals.clear()
        assert copies(attn, layout, causal=True) == ONE_COPY
        assert copies(attn, layout, causal=True) == {}
    assert not rehearsals


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_slopes_have_tables_of_their_own(strategy, elsewhere, rehearsals):
    attn = module(strategy, SilentComm(1, RANKS))
    slopes = torch.ones(SIZES["heads"], device="meta")
    with use_backend("triton"):
        for prepared in (True, False):
            preparation = attn.preparation(**SIZES, causal=True, alibi_slopes=prepared)
            layout = elsewhere("uneven", preparation)
            rehearsals.clear()
            assert copies(attn, layout, causal=True, alibi_slopes=slopes) == ONE_COPY
            assert bool(rehearsals) is not prepared


@pytest.mark.parametrize("change", ["mask", "heads", "head dim", "dtype", "backend"])
def test_other_calls_build_their_own(change, elsewhere, rehearsals):
    other = {
        "heads": {"heads": 32},
        "head dim": {"head_dim": 32},
        "dtype": {"dtype": torch.float16},
    }.get(change, {})
    attn = module("ring", SilentComm(1, RANKS))
    with use_backend("aten" if change == "backend" else "triton"):
        preparation = attn.preparation(**SIZES | other, causal=change != "mask")
    layout = elsewhere("zigzag", preparation)
    rehearsals.clear()
    with use_backend("triton"):
        assert copies(attn, layout, causal=True) == ONE_COPY
    assert rehearsals


@pytest.mark.exhaustive
def test_another_process_with_other_hashes_prepares(elsewhere, rehearsals):
    attn = module("ulysses", SilentComm(1, RANKS))
    program = (
        "import pickle, sys, seqpar; prepare = pickle.load(sys.stdin.buffer); "
        "layout = prepare(seqpar.Layout.zigzag([0, 100, 640], 4)); "
        "sys.stdout.buffer.write(pickle.dumps(layout))"
    )
    with use_backend("triton"):
        preparation = pickle.dumps(attn.preparation(**SIZES, causal=True))
        child = subprocess.run(
            [sys.executable, "-c", program], input=preparation, capture_output=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": "7", "TRITON_INTERPRET": "1"},
        )  # fmt: skip
        layout = pickle.loads(child.stdout)
        assert copies(attn, layout, causal=True) == ONE_COPY
    assert not rehearsals
    assert len({layout, Layout.zigzag([0, 100, 640], 4)}) == 1


def test_a_layout_takes_tables_after_unshard(elsewhere, rehearsals):
    """The table of `unshard` is on the device, so it cannot travel."""
    attn = module("ring", SilentComm(1, RANKS))

    def prepared(layout):
        x = torch.empty(layout.tokens_on(1), 4, device="meta")
        layout.unshard(x, SilentComm(1, RANKS))
        return attn.preparation(**SIZES, causal=True)(layout)

    with use_backend("triton"):
        layout = elsewhere("zigzag", prepared)
        rehearsals.clear()
        assert copies(attn, layout, causal=True) == ONE_COPY
    assert not rehearsals


@pytest.mark.parametrize("strategy", ["ring", "usp"])
def test_layouts_that_are_here_take_the_tables(strategy, elsewhere, rehearsals):
    attn = module(strategy, SilentComm(1, RANKS))
    with use_backend("triton"):
        preparation = attn.preparation(**SIZES, causal=False)
        pickled = pickle.dumps(elsewhere("uneven", preparation))
        layout = layouts(stripe=4)["uneven"]
        copies(attn, layout, causal=True)
        rehearsals.clear()
        assert pickle.loads(pickled).geometry is layout.geometry
        assert copies(attn, layout, causal=True) == {}
        assert copies(attn, layout, causal=False) == ONE_COPY
    assert not rehearsals


def test_pinned_memory_has_the_tables_bits(monkeypatch):
    memory = torch.arange(256, dtype=torch.uint8)
    tables = [memory[64:104].view(torch.int64), memory[128:140].view(torch.int32).view(1, 3)]
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x)
    device_tables.pin(memory, 192)
    device_tables.upload(tables, torch.device("meta"))
    for x in tables:
        assert device_tables.on_device(x, torch.device("meta")).equal(x)


def results(comm, layout, strategy, prepares):
    """out and the gradients of a call on this rank."""
    attn = module(strategy, comm)
    if prepares:
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
        layout = pickle.loads(pickle.dumps(layout.prepare(attn, **sizes, causal=True)))
    generator = torch.Generator().manual_seed(comm.rank)
    q, k, v = (
        torch.randn(layout.tokens_on(comm.rank), n, 16, generator=generator, requires_grad=True)
        for n in (4, 2, 2)
    )
    out = attn(q, k, v, layout, causal=True)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("strategy", ["ring", "token_ring", "usp"])
def test_results_have_the_same_bits(strategy):
    documents = [0, 70, 71, 200]
    expected = virtual(4, results, Layout.zigzag(documents, 4), strategy, False)
    found = virtual(4, results, Layout.zigzag(documents, 4), strategy, True)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 0}, "heads must"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"dtype": torch.int8}, "dtype must"),
        ({"window_size": "all"}, "window_size must"),
        ({"softmax_scale": float("nan")}, "softmax_scale must"),
        ({"alibi_slopes": torch.ones(16)}, "alibi_slopes must"),
    ],
)
def test_wrong_arguments_are_named(change, said):
    attn = module("ring", SilentComm(0, RANKS))
    with pytest.raises(ValueError, match=said):
        layouts(stripe=4)["zigzag"].prepare(attn, **SIZES | {"causal": True} | change)


def test_layouts_of_other_ranks_are_refused():
    attn = module("ring", SilentComm(0, RANKS))
    with pytest.raises(ValueError, match="layout must"):
        Layout.zigzag(64, RANKS + 1).prepare(attn, **SIZES, causal=True)


def test_modules_without_fixed_messages_are_refused():
    layout = Layout.zigzag(64, RANKS)
    with pytest.raises(ValueError, match="attn must be an attention module"):
        layout.prepare(torch.nn.Linear(1, 1), causal=True)
    auto = make_attention("auto", SilentComm(0, 8), cluster=Cluster.preset("1x8-h100"))
    with pytest.raises(ValueError, match="attn must be a module whose messages"):
        layout.prepare(auto, **SIZES, causal=True)


def test_unprepared_layouts_travel_without_tables():
    layout = Layout.zigzag([0, 4096], 2)
    layout.geometry.derived("table", lambda: torch.zeros(2**16))
    assert len(pickle.dumps(layout)) < 2**12
