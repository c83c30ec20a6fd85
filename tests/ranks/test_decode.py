"""Decoding on real processes: a cache that grows, and heads that are sharded as DTensors."""

import argparse

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import seqpar
from benchmarks.ranks import decoding
from seqpar import Layout
from tests.support.cases import STRATEGIES, VARIANTS, module
from tests.support.ranks import device_mesh


def drawn(tokens):
    """q, k and v (1, tokens, heads, 8) of GQA, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    heads = 4, 2, 2
    return [torch.randn(1, tokens, h, 8, generator=generator, dtype=torch.float64) for h in heads]


def expected(q, k, v):
    """Attention of the last queries, causal with aligned ends."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


def error_of_steps(group, prompt):
    """Prefill, and steps of one token and of three: the largest error, and bytes sent a token."""
    attn = module("ring", group, check_ranks=True)
    layout, tensors = Layout.zigzag(prompt, attn.ranks), drawn(prompt + 5)
    cache = seqpar.ShardedCache(attn, layout, block=2)
    q, k, v = (layout.shard(x[:, :prompt], attn.rank, dim=1) for x in tensors)
    attn(q, k, v, layout, causal=True)
    cache.put(0, k, v)
    worst, sent = 0.0, []
    for tokens in (1, 3, 1):
        before, start = attn.sent_bytes, cache.length
        cache.extend(tokens)
        new = [x[:, start : start + tokens] for x in tensors]
        out = cache.attend(0, *new)
        sent.append((attn.sent_bytes - before) / tokens)
        whole = [x[:, : start + tokens] for x in tensors]
        worst = max(worst, float((out - expected(new[0], *whole[1:])).abs().max()))
    return worst, sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cache_grows_on_real_ranks(pool, ranks):
    """The digests of `check_ranks`, 64 bytes per round of a step, come on top of the partials."""
    for prompt in (9, 400):
        for worst, sent in pool(ranks, error_of_steps, prompt):
            partials = (ranks - 1) * 4 * (8 + 1) * 8
            digest = (ranks - 1).bit_length() * 64
            assert worst <= 1e-12
            assert sent == [partials + digest, partials + digest / 3, partials + digest]


def errors_of_strategies(group):
    """The largest error of `decode` and of a cache, for each strategy on this group."""
    rank, ranks, tensors = group.rank(), group.size(), drawn(11)
    layout, (q, k, v) = Layout.zigzag(9, ranks), [x[:, :9] for x in tensors]
    parts = [layout.shard(x, rank, dim=1) for x in (k, v)]
    found = {}
    for name in (*STRATEGIES, *VARIANTS):
        attn = module(name, group)
        out = attn.decode(q[:, -2:], *parts, layout)
        errors = [out - expected(q[:, -2:], k, v)]
        cache = seqpar.ShardedCache(attn, layout)
        cache.put(0, *parts)
        for stop in (10, 11):
            cache.extend()
            out = cache.attend(0, *(x[:, stop - 1 : stop] for x in tensors))
            whole = [x[:, :stop] for x in tensors[1:]]
            errors.append(out - expected(tensors[0][:, stop - 1 : stop], *whole))
        found[name] = max(float(x.abs().max()) for x in errors)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_strategy_decodes_with_and_without_a_cache(pool, ranks):
    for errors in pool(ranks, errors_of_strategies):
        assert len(errors) == len(STRATEGIES) + len(VARIANTS)
        assert max(errors.values()) <= 1e-12, errors


def error_with_sharded_heads(group):
    mesh = device_mesh(2, 2, names=("tokens", "heads"))
    attn = seqpar.RingAttention(mesh["tokens"])
    layout, (q, k, v) = Layout.zigzag(40, 2), drawn(40)
    parts = q[:, -2:], *(layout.shard(x, attn.rank, dim=1) for x in (k, v))
    sharded = [distribute_tensor(x, mesh["heads"], [Shard(2)]) for x in parts]
    out = attn.decode(*sharded, layout)
    assert out.placements == (Shard(2),)
    return float((out.full_tensor() - expected(q[:, -2:], k, v)).abs().max())


@pytest.mark.composes(
    "PyTorch",
    "decoding: a `ShardedCache` takes DTensors whose heads are sharded",
    context=2,
    tensor=2,
    equal="out",
)
def test_heads_may_be_sharded(pool):
    assert max(pool(4, error_with_sharded_heads)) <= 1e-12


def benchmarked(group):
    """What the benchmark times on this rank, in miniature, and the error that it finds."""
    sizes = {"keys": 16, "heads": 4, "kv_heads": 2, "dim": 8, "rounds": 2, "layers": 2}
    with torch.no_grad():
        steps, error = decoding.contenders(argparse.Namespace(**sizes))
        for step in (*steps.values(), *steps.values()):
            step()
    return sorted(steps), error


def test_the_benchmark_times_what_is_right(pool):
    for names, error in pool(4, benchmarked):
        assert names == ["exchange", "local", "sdpa", "step"]
        assert error <= decoding.LARGEST_ERROR
