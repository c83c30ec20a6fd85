"""NaN and infinities in q, k, v and sinks: ranks and caches make of them what one device does."""

import itertools
import math
import random

import pytest
import torch

from seqpar import Layout, ShardedCache, merge, use_backend
from seqpar.softmax.compute.partial import logaddexp_anywhere
from tests.support.cases import module
from tests.support.ranks import virtual
from tests.support.special_values import (
    EQUAL,
    NOT_FINITE,
    OPTIONS,
    VALUES,
    assert_alike,
    attention,
    expected,
    inputs,
    kinds,
)
from tests.support.tiers import few_rows

STRATEGIES = [
    *("ring", "all_gather", "ulysses", "usp", "mesh", "token_ring", "disaggregated"),
    "disaggregated+at random+server",
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
PLACES = ["q", "k", "v", "sinks"]
QUICK = list(zip((1, 7, 15, 17), PLACES, strict=True))  # rows of `make test`
ON_TILES = ("ring", "all_gather", "ulysses", "usp")  # which take deterministic="ranks"


def numbers_and_places():
    """Numbers of keys of a rank, and what is not finite: of most, two places in turn."""
    near_widths_of_vectors = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40)
    for keys, (i, place) in itertools.product(near_widths_of_vectors, enumerate(PLACES)):
        if keys in (1, 7, 15, 17) or (keys // 2 + i) % 2 == 0:
            marks = [] if (keys, place) in QUICK else pytest.mark.exhaustive
            yield pytest.param(keys, place, marks=marks)


@pytest.mark.parametrize(("keys", "place"), list(numbers_and_places()))
def test_results_are_those_of_one_device(keys, place):
    """Out and lse are the same; but where infinite values are merged, out may be NaN for ±∞.

    A gradient that is not finite on one device is not here either.
    """
    drawn = random.Random(f"{keys} {place}")
    for i, strategy in enumerate(STRATEGIES):
        value = list(VALUES)[(i + keys) % 3]
        options, dtype = drawn.choice(list(OPTIONS.values())), drawn.choice(DTYPES)
        with_sinks, whole = place == "sinks" or drawn.random() < 0.3, drawn.random() < 0.7
        on_tiles = {"deterministic": "ranks"} if drawn.random() < 0.3 else {}
        ranks = 4 if strategy == "mesh" and keys < 9 else 2
        tensors = inputs(ranks * keys, place, VALUES[value], dtype, whole)
        arguments = strategy, Layout.contiguous(ranks * keys, ranks), tensors
        arguments += drawn.choice(["aten", "aten", "reference"]), options, with_sinks

        def run(comm, arguments=arguments, of_module=on_tiles if strategy in ON_TILES else {}):
            return attention(comm, *arguments, **of_module)

        infinite = place == "v" and value != "NaN"
        rules = {"out": NOT_FINITE if infinite else EQUAL, "lse": EQUAL}
        right = expected(tensors, options, with_sinks)
        for results in virtual(ranks, run):
            assert_alike(results, right, dtype, rules)


def test_sums_of_tiles_have_torchs_limits():
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 700.0], dtype=torch.float64)
    x, y = torch.meshgrid(values, values, indexing="ij")
    torch.testing.assert_close(logaddexp_anywhere(x, y), torch.logaddexp(x, y), equal_nan=True)


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("value", VALUES)
def test_other_documents_stay_finite(backend, value):
    for keys in (3, 20):
        layout = Layout.contiguous([0, keys, 2 * keys], 2)
        for place in "qkv":
            tensors = inputs(2 * keys, place, VALUES[value])
            arguments = "ring", layout, tensors, backend, OPTIONS["full"], False
            for results in virtual(2, attention, *arguments):
                assert all(x[:keys].isfinite().all() for x in results)
                assert value != "NaN" or results[0][keys:].isnan().any()


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_scores_of_minus_infinity_count_as_no_keys(backend):
    """Such keys weigh nothing: one rank's, and all keys of a query."""

    def result(comm, layout):
        generator = torch.Generator().manual_seed(0)
        q = torch.rand(8, 1, 8, generator=generator) + 0.1
        k, v = (torch.rand(8, 1, 8, generator=generator) for _ in range(2))
        k[:4] = -torch.inf
        q, k, v = (layout.shard(x, comm.rank) for x in (q, k, v))
        with use_backend(backend):
            out, lse = module("ring", comm)(q, k, v, layout, causal=True, return_lse=True)
        return [layout.unshard(x.contiguous(), comm) for x in (out, lse)]

    out, lse = virtual(1, result, Layout.contiguous(8, 1))[0]
    assert (out[:4] == 0).all() and lse[:4].isneginf().all() and lse[4:].isfinite().all()
    for found in virtual(2, result, Layout.contiguous(8, 2)):
        torch.testing.assert_close(found[0], out)
        torch.testing.assert_close(found[1], lse)


def test_merge_keeps_nan():
    out, lse = torch.ones(3, 1, 4, requires_grad=True), torch.zeros(3, 1)
    other = torch.tensor([[math.nan], [-math.inf], [0.0]])
    for lses in ([lse, other], [other, lse]):
        merged, total = merge([out, out], lses)
        assert merged.isnan().all(-1).flatten().tolist() == [True, False, False]
        assert total.isnan().flatten().tolist() == [True, False, False]
        (gradient,) = torch.autograd.grad(merged.sum(), out)
        assert gradient[0].isnan().all() and gradient[1:].isfinite().all()
    for value in VALUES.values():
        merged, total = merge([out, torch.full_like(out, value)], [lse, lse])
        assert not merged.isfinite().any() and total.isfinite().all()


@pytest.mark.parametrize("value", VALUES)
def test_largest_scores_keep_it(value):
    def largest(comm, layout, tensors):
        q, k, v = (layout.shard(tensors[x], comm.rank) for x in "qkv")
        return module("ring", comm)(q, k, v, layout, causal=True, return_max_logits=True)[1]

    for place in "qk":
        tensors = inputs(12, place, VALUES[value], whole=False)
        (alone,) = virtual(1, largest, Layout.contiguous(12, 1), tensors)
        for found in virtual(2, largest, Layout.contiguous(12, 2), tensors):
            assert torch.equal(kinds(found), kinds(alone)) and not alone[0].isfinite()


def test_decode_keeps_nan():
    """The second rank has few keys, and all scores of a query are NaN."""

    def decode(comm, layout):
        q, k = torch.ones(1, 1, 8), torch.ones(layout.tokens_on(comm.rank), 1, 8)
        k = k * (math.nan if comm.rank else 1)
        with torch.no_grad():
            return module("ring", comm).decode(q, k, k, layout, return_lse=True)

    for keys in (1, 5, 15, 16):
        for out, lse in virtual(2, decode, Layout.contiguous(2 * keys, 2)):
            assert out.isnan().all() and lse.isnan().all()


def steps(cache, tensors, start, stop):
    """out and lse of tokens that are decoded one by one, of which one first had another value."""
    found = []
    for i in range(start, stop):
        q, k, v = (tensors[x][i : i + 1] for x in "qkv")
        if i == start:  # a token that is dropped again leaves nothing behind
            cache.extend()
            cache.attend(0, q, torch.full_like(k, math.nan), torch.full_like(v, math.inf))
            cache.truncate(cache.length - 1)
        cache.extend()
        found.append(cache.attend(0, q, k, v, return_lse=True, sinks=tensors["sinks"]))
    return [torch.cat(x) for x in zip(*found, strict=True)]


@few_rows()
@pytest.mark.parametrize("place", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("value", VALUES)
def test_cached_steps_equal_one_device(place, value):
    """The value is in the prefill, at 4, and in a step, at 8."""
    rules = {"out": NOT_FINITE if place == "v" and value != "NaN" else EQUAL, "lse": EQUAL}
    for tokens, prefill in ((9, 6), (17, 5)):
        tensors = inputs(tokens, place, VALUES[value])
        right = [x[prefill:] for x in expected(tensors, {"causal": True}, True)[:2]]

        def decode(comm, tensors=tensors, prefill=prefill, tokens=tokens):
            layout = Layout.contiguous(prefill, 2)
            cache = ShardedCache(module("ring", comm), layout, block=2)
            cache.put(0, *(layout.shard(tensors[x][:prefill], comm.rank) for x in "kv"))
            return steps(cache, tensors, prefill, tokens)

        for results in virtual(2, decode):
            assert_alike(results, right, torch.float32, rules)
