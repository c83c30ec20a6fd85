"""A layout's first call of linear attention copies all of its tables to the device at once, and
another process may build them ahead of time. Later calls copy nothing and read nothing back. The
meta device stands in for a GPU."""

import itertools
import pickle
import weakref

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import LASP2Attention, Layout, RecurrentAttention, use_backend
from seqpar.core import background
from seqpar.layout import handle
from seqpar.linear.linear_operator import LINEAR_ATTENTION
from seqpar.linear.linear_strategy import LinearStrategy
from seqpar.linear.maps.backends import fla
from seqpar.linear.maps.map_strategy import MapStrategy
from tests.support.fakes import AtOnce
from tests.support.ranks import virtual
from tests.support.steady import RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16, "device": "meta"}
ONE_COPY = {"aten._to_copy.default": 1}
LASP2 = [("lasp2", transport) for transport in ("all_gather", "scan")]
RECURRENT = [("delta", transport) for transport in ("all_gather", "scan", "tree")]
STATES = [{"initial_state": begun, "return_state": begun} for begun in (False, True)]


def module(name, transport, rank):
    comm = SilentComm(rank, RANKS)
    if name == "lasp2":
        return LASP2Attention(comm, transport)
    return RecurrentAttention(comm, name, transport)


def call(attn, layout, backward=True, **options):
    """A forward and a backward through the operators, as below autograd."""
    rows, meta = (layout.tokens_on(attn.rank),), torch.device("meta")

    def empty(*sizes):
        return torch.empty(*rows, *sizes, dtype=torch.bfloat16, device=meta, requires_grad=backward)

    tensors = {name: empty(heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    if isinstance(attn._bound.strategy, MapStrategy):
        tensors["beta"] = empty(2)
    elif options.get("causal", True):
        options.setdefault("log_decay", torch.empty(2, device=meta))
    if options.pop("initial_state", False):
        shape = layout.documents, 2, 16, 16
        options["initial_state"] = torch.empty(shape, device=meta)
    inputs, arguments, _ = attn._operator_inputs(**tensors, layout=layout, **options)
    with torch.no_grad():
        out, final, numbers, entered = LINEAR_ATTENTION._forward(*inputs, *arguments)
        if backward:
            results = [out, final], [entered]
            saved = LINEAR_ATTENTION.save(attn._bound, inputs, arguments, *results)
            tensors = [x.detach() for x in saved.tensors if x is not None]
            given = [x is not None for x in saved.tensors]
            LINEAR_ATTENTION._backward(out, final, tensors, given, saved.sizes, numbers, *arguments)


def copies(attn, layout, **options):
    """By name, the operators in which the host copies to the device or waits for it."""
    with HostWaits() as waits:
        call(attn, layout, **options)
    return dict(waits.found)


@pytest.fixture
def fresh(monkeypatch):
    """Kernels do not run, threads do, and a layout has no tables yet."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    monkeypatch.setattr(background, "threads", AtOnce)
    monkeypatch.setattr(fla, "refusal", lambda q, v: None)
    monkeypatch.setattr(fla, "_function", lambda kind: fla_on_meta)
    forget = lambda: monkeypatch.setattr(handle, "_by_digest", weakref.WeakValueDictionary())  # noqa: E731

    def fresh_layout(name):
        forget()
        return layouts(stripe=16)[name]

    return fresh_layout


def fla_on_meta(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu, beta, **_):
    assert cu_seqlens.is_meta and cu_seqlens_cpu.device.type == "cpu"
    total = q.sum() + k.sum() + beta.sum()
    states = v.new_empty((len(cu_seqlens) - 1, v.shape[2], k.shape[3], v.shape[3])).float()
    return v + total, states + total if initial_state is None else initial_state + total


@pytest.fixture
def elsewhere(fresh):
    """Prepare a layout in another process: none of its tables are here before it is unpickled."""

    def prepared(name, preparation):
        pickled = pickle.dumps(preparation(fresh(name)))
        fresh(name)
        return pickle.loads(pickled)

    return prepared


@pytest.fixture
def rehearsals(monkeypatch):
    """The number of rehearsals so far, in a list."""
    found, run = [], LinearStrategy.rehearse
    monkeypatch.setattr(LinearStrategy, "rehearse", lambda *args: (found.append(1), run(*args))[1])
    return found


CASES = [
    *((case, backend) for case in LASP2 for backend in ("aten", "triton")),
    *((case, backend) for case in RECURRENT for backend in ("aten", "fla")),
]


@few_rows()
@pytest.mark.parametrize("states", STATES, ids=["no states", "states"])
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_tables_travel_once(case, backend, states, fresh):
    names = itertools.cycle(["zigzag", "uneven", "contiguous"])
    with use_backend(backend):
        for rank, name in zip(range(RANKS), names, strict=False):
            attn, layout = module(*case, rank), fresh(name)
            first = copies(attn, layout, **states)
            assert first in (ONE_COPY, {}), (rank, name)  # {}: the rank has no tokens
            assert first or not layout.tokens_on(rank)
            assert copies(attn, layout, **states) == {}


@pytest.mark.parametrize("case", LASP2)
def test_a_decay_of_the_host_is_copied_once(case, fresh):
    attn, layout, decay = module(*case, 1), fresh("zigzag"), torch.full((2,), -0.1)
    assert copies(attn, layout, log_decay=decay)
    assert copies(attn, layout, log_decay=decay) == {}


@few_rows(pairs=False)
@pytest.mark.parametrize("states", STATES, ids=["no states", "states"])
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_first_call_finds_prepared_tables(case, backend, states, elsewhere, rehearsals):
    attn = module(*case, 1)
    with use_backend(backend):
        preparation = pickle.loads(pickle.dumps(attn.preparation(**SIZES, **states)))
        layout = elsewhere("zigzag", preparation)
        assert rehearsals.pop() and not rehearsals
        assert copies(attn, layout, **states) == ONE_COPY
        assert copies(attn, layout, **states) == {}
    assert not rehearsals


def test_preparation_ignores_the_default_device():
    def run(comm):
        lin, x = LASP2Attention(comm), torch.ones(5, 2, 4)
        options = {"heads": 2, "head_dim": 4, "dtype": torch.float32, "device": "cpu"}
        layout, log_decay = Layout.contiguous([0, 3, 10], 2), torch.full((2,), -0.1)
        with torch.device("meta"):
            layout = lin.preparation(**options)(layout)
            return lin(x, x, x, layout, log_decay=log_decay)

    assert all(out.isfinite().all() for out in virtual(2, run))


def test_prepared_tables_of_backward_travel_with_a_forward(elsewhere):
    """In compiled code tensors do not say that they will be differentiated."""
    attn = module("delta", "all_gather", 1)
    with use_backend("aten"):
        layout = elsewhere("zigzag", attn.preparation(**SIZES))
        assert copies(attn, layout, backward=False) == ONE_COPY
        assert copies(attn, layout) == {}


def test_noncausal_calls_find_their_tables(elsewhere, rehearsals):
    attn = module("lasp2", "all_gather", 1)
    with use_backend("triton"):
        layout = elsewhere("uneven", attn.preparation(**SIZES, causal=False))
        rehearsals.clear()
        assert copies(attn, layout, causal=False) == ONE_COPY
    assert not rehearsals


@pytest.mark.parametrize("change", ["states", "head dim", "backward", "backend"])
def test_other_calls_build_their_own_tables(change, elsewhere, rehearsals):
    attn = module("delta", "all_gather", 1)
    sizes = SIZES | ({"head_dim": 32} if change == "head dim" else {})
    with use_backend("fla" if change == "backend" else "aten"):
        preparation = attn.preparation(
            **sizes, return_state=change == "states", backward=change != "backward"
        )
    layout = elsewhere("zigzag", preparation)
    rehearsals.clear()
    with use_backend("aten"):
        assert copies(attn, layout) == ONE_COPY
    assert rehearsals


def results(comm, layout, name, prepares):
    """out and the gradients of a call on this rank."""
    attn = LASP2Attention(comm) if name == "lasp2" else RecurrentAttention(comm, name)
    if prepares:
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
        layout = pickle.loads(pickle.dumps(layout.prepare(attn, **sizes)))
    generator = torch.Generator().manual_seed(comm.rank)
    rows = layout.tokens_on(comm.rank)
    tensors = {
        key: torch.randn(rows, n, 16, generator=generator).div(4).requires_grad_()
        for key, n in (("q", 4), ("k", 2), ("v", 2))
    }
    if name == "delta":
        tensors["beta"] = torch.rand(rows, 2, generator=generator, requires_grad=True)
    out = attn(**tensors, layout=layout)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in tensors.values())]


@pytest.mark.parametrize("name", ["lasp2", "delta"])
def test_results_have_the_same_bits(name):
    documents = [0, 70, 71, 200]
    expected = virtual(4, results, Layout.zigzag(documents, 4), name, False)
    found = virtual(4, results, Layout.zigzag(documents, 4), name, True)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 0}, "heads must"),
        ({"kv_heads": 3}, "heads must be a multiple or a divisor of kv_heads, 3, got 4"),
        ({"dtype": torch.int8}, "dtype must"),
        ({"causal": False}, "causal must be True"),
        ({"return_state": "all"}, "return_state must"),
    ],
)
def test_wrong_arguments_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        layouts(stripe=16)["zigzag"].prepare(module("delta", "tree", 0), **SIZES | change)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="window_size is not an argument of a call"):
        module("lasp2", "scan", 0).preparation(**SIZES, window_size=4)


def test_layouts_of_other_ranks_are_refused():
    with pytest.raises(ValueError, match="layout must"):
        Layout.zigzag(64, RANKS + 1).prepare(module("lasp2", "scan", 0), **SIZES)
