"""Peers: which tokens they have, what their libraries are called with, and what they refuse."""

import sys
import types

import pytest
import torch

from seqpar import Layout
from seqpar.bench.workloads.contenders import PEERS, make_peer
from seqpar.bench.workloads.sweep_batches import PackedBatch
from seqpar.comm import plain

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    """This is rank 1 of 2."""
    monkeypatch.setattr(plain, "rank_of_all", lambda: (1, 2))


@pytest.fixture
def called(monkeypatch):
    """What the packages' functions, which are not here, were called with."""
    calls = []

    def function(name):
        def call(q, k, v, **options):
            calls.append((name, tuple(q.shape), options))
            return q + v.mean()

        return call

    ring = types.ModuleType("ring_flash_attn")
    ring.zigzag_ring_flash_attn_func, ring.ring_flash_attn_func = map(function, ("zigzag", "ring"))
    module = types.ModuleType("ring_attention_pytorch.ring_flash_attention")
    module.ring_flash_attn = function("lucidrains")
    monkeypatch.setitem(sys.modules, "ring_flash_attn", ring)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch", types.ModuleType("package"))
    return calls


@pytest.mark.parametrize(("name", "mask", "layout", "call"), [
    ("ring-flash-attn", "causal", Layout.zigzag, ("zigzag", {"causal": True})),
    ("ring-flash-attn", "full", Layout.contiguous, ("ring", {"causal": False})),
    ("ring-attention-pytorch", "causal", Layout.contiguous,
     ("lucidrains", {"causal": True, "ring_reduce_col": True})),
])  # fmt: skip
def test_packages_are_called_as_they_say(called, name, mask, layout, call):
    indices, attend, _ = make_peer(name, PackedBatch.of(mask, 16), CPU)
    assert torch.equal(indices, layout(16, 2).token_indices(1))
    q = torch.randn(8, 2, 4)
    assert attend(q, q, q).shape == q.shape
    assert called == [(call[0], (1, 8, 2, 4), call[1])]


@pytest.mark.parametrize(("name", "mask", "tokens", "wrong"), [
    ("ring-flash-attn", "causal", 18, "4 equal chunks, got 18"),
    ("ring-flash-attn", "full", 17, "equal tokens on all ranks, got 17 tokens on 2"),
    ("all-to-all-by-hand", "causal", 17, "equal tokens on all ranks"),
    ("torch-context-parallel", "full", 18, "4 equal chunks, got 18"),
    *((name, "causal-pile", 512, "one document with a causal or full mask") for name in PEERS),
    *((name, "window:4", 16, "one document with a causal or full mask") for name in PEERS),
])  # fmt: skip
def test_what_a_peer_cannot_is_refused(name, mask, tokens, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_peer(name, PackedBatch.of(mask, tokens), CPU)


def test_heads_that_cannot_be_exchanged_are_refused():
    q, k = torch.randn(8, 2, 4), torch.randn(8, 1, 4)
    _, attend, _ = make_peer("all-to-all-by-hand", PackedBatch.of("causal", 16), CPU)
    with pytest.raises(
        ValueError, match="number of ranks must divide the KV heads, got 1 heads on 2"
    ):
        attend(q, k, k)
