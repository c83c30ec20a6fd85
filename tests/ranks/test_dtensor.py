"""Tensor parallelism: DTensors whose heads are sharded, on a mesh of 2 × 2 real ranks."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import seqpar
from seqpar import LASP2Attention, Layout
from tests.support.calls import local
from tests.support.cases import module
from tests.support.ranks import device_mesh
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 30, 70], 2)


def meshes(group):
    """The ranks that share tokens, and those that share heads."""
    mesh = device_mesh(2, 2, names=("tokens", "heads"))
    return mesh["tokens"], mesh["heads"]


def agreement(group, strategy, batched):
    """Attention on DTensors equals that on whole tensors: out, lse and gradients."""
    tokens, heads = meshes(group)
    attn = module(strategy, tokens)
    plain = local(LAYOUT, attn.rank, heads=4, kv_heads=2)
    plain = [x.detach()[None].clone() if batched else x.detach().clone() for x in plain]
    sinks_and_scale = [0.1, 0.2, -0.3, 0.4], [0.3, 0.5, 0.7, 1.0]
    plain += [torch.tensor(x, dtype=torch.float64) for x in sinks_and_scale]
    results = []
    for sharded in (False, True):
        inputs = [x.clone().requires_grad_() for x in plain]
        q, k, v, sinks, scale = inputs
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
        if sharded:
            slopes = distribute_tensor(slopes, heads, [Shard(0)])
            dims = [1 + batched] * 3 + [0, 0]
            inputs = [
                distribute_tensor(x.detach(), heads, [Shard(dim)]).requires_grad_()
                for x, dim in zip(inputs, dims, strict=True)
            ]
            q, k, v, sinks, scale = inputs
        out, lse = attn(q, k, v, LAYOUT, causal=True, sinks=sinks, softmax_scale=scale,
                        alibi_slopes=slopes, return_lse=True)  # fmt: skip
        if sharded:
            assert out.placements == (Shard(1 + batched),) and lse.placements == out.placements
            assert out.shape == q.shape and lse.shape == q.shape[:-1]
        (out.square().sum() + lse.sum()).backward()
        found = [out, lse, *(x.grad for x in inputs)]
        results.append([x.full_tensor() if sharded else x for x in found])
    return max(float((x - y).detach().abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.composes(
    "PyTorch",
    "q, k, v, sinks and scales are DTensors whose heads are sharded; so are the results",
    context=2,
    tensor=2,
    equal="out, lse and gradients",
)
@few_rows()
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_sharded_heads_equal_whole_ones(pool, strategy, batched):
    assert max(pool(4, agreement, strategy, batched)) <= 1e-12


def linear_agreement(group):
    tokens, heads = meshes(group)
    lin, results = LASP2Attention(tokens), []
    plain = [x.detach() for x in local(LAYOUT, lin.rank, heads=4, kv_heads=2)]
    decay = torch.tensor([-0.1, -0.2], dtype=torch.float64)
    for place in (Shard, None):
        whole = (x.clone() for x in plain)
        inputs = [distribute_tensor(x, heads, [Shard(1)]) if place else x for x in whole]
        inputs = [x.requires_grad_() for x in inputs]
        log_decay = distribute_tensor(decay, heads, [Shard(0)]) if place else decay
        out, state = lin(*inputs, LAYOUT, log_decay=log_decay, return_state=True)
        assert not place or out.placements == state.placements == (Shard(1),)
        (out.square().sum() + state.square().sum()).backward()
        found = [out, state, *(x.grad for x in inputs)]
        results.append([x.full_tensor() if place else x for x in found])
    return max(float((x - y).detach().abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.composes(
    "PyTorch",
    "linear attention takes the same DTensors",
    context=2,
    tensor=2,
    equal="out, state and gradients",
)
def test_linear_attention_takes_sharded_heads(pool):
    assert max(pool(4, linear_agreement)) <= 1e-12


def replicated(group):
    tokens, heads = meshes(group)
    attn = seqpar.RingAttention(tokens)
    plain = [x.detach() for x in local(LAYOUT, attn.rank)]
    inputs = [distribute_tensor(x, heads, [Replicate()]) for x in plain]
    out = attn(*inputs, LAYOUT, causal=True)
    assert out.placements == (Replicate(),)
    return torch.equal(out.to_local(), attn(*plain, LAYOUT, causal=True))


def test_replicated_tensors_are_computed_everywhere(pool):
    assert pool(4, replicated) == [True] * 4
