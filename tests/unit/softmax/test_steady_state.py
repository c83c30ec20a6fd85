"""From a layout's second call on, no strategy makes the host wait for the device: it uploads no
table, indexes with no table of the host's, and reads no number back."""

import contextlib
import itertools

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Mask, use_backend
from seqpar.core.hooks import hooks
from seqpar.softmax.call import Operands
from seqpar.softmax.keys import rank_invariant_plan
from tests.support.cases import STRATEGIES, VARIANTS, module
from tests.support.same_bits import STRATEGIES as SAME_BITS
from tests.support.steady import RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

LAYOUTS = layouts(stripe=4)
MASKS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (20, 0)},
    "prefix": {"causal": True, "prefix_lens": [30, 0, 0, 5, 0, 64]},
    "ranges": {"mask": Mask.of_ranges([(0, 0, 20, 0, 20, None, 0), (5, 0, 60, 0, 9, None, None)])},
}
BACKENDS = ["stub", "triton", "aten", "reference"]
CHEAP = ["stub", "triton"]  # of which kernels are stubbed
EXHAUSTIVE = pytest.mark.exhaustive
SEEN = (0, RANKS // 2, RANKS - 1)


@contextlib.contextmanager
def computing(backend):
    """Compute by a backend without running its kernels, or by none, "stub"."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launching, "_run", lambda *arguments: None)
        if backend == "stub":
            with hooks.set(replace_compute=lambda area: None):
                yield
        else:
            with use_backend(backend):
                yield


def operands(layout, rank, heads, kv_heads):
    """q, k, v, (1, T_local, heads, 16) each, and dout, on the meta device."""
    return [
        torch.empty(1, layout.tokens_on(rank), n, 16, dtype=torch.bfloat16, device="meta")
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def softmax_call(attn, layout, mask):
    """Forward and backward, with all that may travel and be reduced."""
    q, k, v, dout = operands(layout, attn.rank, heads=16, kv_heads=8)
    sinks = torch.empty(16, device="meta")
    call = attn._resolve(q, k, v, layout, sinks=sinks, return_lse=True, **MASKS[mask])
    bound = attn._bound
    out, lse, residuals = bound.strategy.forward(bound.comm.call(), call, Operands(q, k, v, sinks))
    kept, dlse = residuals or [q, k, v, out, lse], torch.empty_like(lse)
    if residuals and bound.strategy.keeps_operands:
        kept = [q, k, v, out, lse, *residuals]
    bound.strategy.backward(bound.comm.call(), call, dout, dlse, sinks, kept)


def waits(make, call, calls):
    """For what the host waits in second calls, each of a layout, an option and a rank; those in
    which it waits for nothing are left out."""
    found = {}
    for name, option, rank in calls:
        attn, second = make(SilentComm(rank, RANKS)), HostWaits()
        call(attn, LAYOUTS[name], option)
        with second:
            call(attn, LAYOUTS[name], option)
        if second.found:
            found[name, option, rank] = dict(second.found)
    return found


def in_turn(pairs, first=0):
    """Calls of each layout and option on one rank: on the edges and in the middle in turn."""
    ranks = itertools.islice(itertools.cycle(SEEN), first, None)
    return [(*pair, rank) for pair, rank in zip(pairs, ranks, strict=False)]


def on_all(pairs, first=0):
    """Calls of each layout and option on all of these ranks."""
    return [(*pair, rank) for pair, rank in itertools.product(pairs, SEEN)]


def rows():
    """Strategies and backends; `make test` has backends in turn, and the slow reference once.

    CI has ranks in turn, another first one for each backend, so that with "stub" and "triton" every
    layout is on every rank; `make test-every-row` has all ranks.
    """
    for i, strategy in enumerate([*STRATEGIES, *VARIANTS]):
        backends = BACKENDS if strategy in STRATEGIES else CHEAP
        quick = {
            backends[i % min(3, len(backends))],
            *(["reference"] if strategy == "ring" else []),
        }
        for backend in backends:
            marks = () if backend in quick else EXHAUSTIVE
            yield pytest.param(strategy, backend, in_turn, marks=marks)
            if backend in CHEAP:
                marks = [EXHAUSTIVE, pytest.mark.every_row]
                yield pytest.param(strategy, backend, on_all, marks=marks)


@pytest.mark.parametrize(("strategy", "backend", "ranks"), list(rows()))
def test_softmax_waits_for_nothing(strategy, backend, ranks):
    pairs = list(itertools.product(["zigzag"], MASKS))
    if backend in CHEAP:
        others = [name for name in LAYOUTS if name != "zigzag"]
        pairs += itertools.product(others, ["causal", "window"])
    calls = ranks(pairs, BACKENDS.index(backend))
    with computing(backend):
        assert not waits(lambda comm: module(strategy, comm), softmax_call, calls)


@few_rows()
@pytest.mark.parametrize("strategy", ["ulysses", "usp", "usp+token_ring"])
@pytest.mark.parametrize("backend", CHEAP)
def test_nor_does_it_where_tokens_are_kept(strategy, backend):
    def make(comm):
        return module(strategy, comm, keep="tokens")

    with computing(backend):
        assert not waits(make, softmax_call, on_all(itertools.product(LAYOUTS, ["causal"])))


@few_rows()
@pytest.mark.parametrize(
    "strategy",
    [x if x in ("ring", "usp") else pytest.param(x, marks=EXHAUSTIVE) for x in SAME_BITS],
)
@pytest.mark.parametrize("backend", CHEAP)
def test_invariant_bits_need_no_copies_either(strategy, backend, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 32)

    def make(comm):
        return module(strategy, comm, deterministic="ranks")

    with computing(backend):
        assert not waits(make, softmax_call, in_turn(itertools.product(LAYOUTS, ["causal"])))


def test_waits_are_counted():
    device, host = torch.empty(4, 2, device="meta"), torch.tensor([0, 1])
    with HostWaits() as waits_for:
        device[host]
        device.index_select(0, host)
        device.copy_(torch.empty(2))
        host.to("meta")
        torch.tensor([1.0], device="meta")
        assert sum(waits_for.found.values()) == 5
        device + 1
        device[:, 1] += device[:, 0]
        host + 1
        assert sum(waits_for.found.values()) == 5
