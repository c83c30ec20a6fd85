"""The backend "triton" under every strategy, on real ranks, against the oracle; in Triton's
interpreter without a GPU."""

import dataclasses
import warnings

import pytest
import torch
import triton

from seqpar import Layout, make_attention, use_backend
from seqpar.attention.backend import load_backend
from seqpar.softmax import attend
from seqpar.softmax.backends import triton as fused
from seqpar.softmax.backends.varlen import varlen_work
from seqpar.softmax.keys import key_plan
from tests.kernels.operands import TRITON_REFUSES
from tests.support.calls import assert_infinite_sinks_are_limits, local
from tests.support.cases import (
    NAMES,
    STRATEGIES,
    Case,
    assert_right,
    oracle,
    rms,
    run,
)
from tests.support.special_values import NOT_FINITE as THE_SAME_PLACES
from tests.support.special_values import OPTIONS as MASKS
from tests.support.special_values import VALUES, assert_alike, attention, expected, inputs
from tests.support.tiers import few_rows

OPTIONS = {"heads": 2, "kv_heads": 1, "dim": 16, "value_dim": 16, "backend": "triton"}
HEADS = {"ulysses": {"heads": 4, "kv_heads": 2}}  # so that each of 3 ranks has some
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these ranks are CPU processes with the interpreter"
)


CASES = {
    "sinks": {
        "layout": Layout.zigzag([0, 35, 36, 70], 3),
        "causal": True,
        "dlse": True,
        "sinks": True,
    },
    "window": {
        "layout": Layout.striped([0, 50, 70], 3, 4),
        "causal": True,
        "window": (20, 0),
        "dtype": torch.float16,
    },
    "bidirectional": {
        "layout": Layout.contiguous([0, 50, 70], 3),
        "causal": False,
        "window": (9, 30),
        "softcap": 2.0,
    },
    "slopes": {
        "layout": Layout.zigzag([0, 35, 36, 70], 3),
        "kv_layout": Layout.striped([0, 41, 60, 90], 3, stripe=4),
        "causal": True,
        "alibi": "heads",
        "dlse": True,
    },
    "short prefix": {"layout": Layout.zigzag([0, 20, 44], 3), "causal": True, "prefix": (10, 0)},
    "ranges": {
        "layout": Layout.zigzag([0, 18, 30], 3),
        "causal": False,
        "ranges": ((0, 0, 18, 0, 18, None, 0), (0, 4, 9, 4, 9, 1, None), (1, 0, 12, 2, 5, -6, 0)),
        "heads": 2,
        "kv_heads": 1,
        "dlse": True,
    },
    "prefix": {
        "layout": Layout.zigzag([0, 60, 130], 3),
        "causal": True,
        "prefix": (10, 0),
        "heads": 5,
        "kv_heads": 1,
        "batch": 2,
    },
}


def strategies_and_cases():
    """All cases of a ring, and of each other strategy one; some of a ring's are exhaustive."""
    yield "disaggregated+at random", "short prefix"
    for name in CASES:
        cheap = name in ("sinks", "bidirectional", "slopes", "ranges")
        yield pytest.param("ring", name, marks=() if cheap else pytest.mark.exhaustive)
    for i, strategy in enumerate(x for x in STRATEGIES if x != "ring"):
        yield strategy, ("window", "sinks")[i % 2]


@pytest.mark.parametrize(("strategy", "name"), list(strategies_and_cases()))
def test_equals_the_oracle(pool, strategy, name):
    options = OPTIONS | HEADS.get(strategy, {}) | {"dtype": torch.float32} | CASES[name]
    case = Case(strategy, **options)
    assert_right(pool(3, run, case)[0], oracle(case), case.dtype, roundings=8)


def largest_scores(group, layout):
    """The largest score of each head, computed beside each backend."""
    attn, found = make_attention("ring", group), []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            q, k, v = local(layout, attn.rank, dtype=torch.float32)
            found.append(attn(q, k, v, layout, causal=True, return_max_logits=True)[1])
    return torch.equal(*found)


def test_the_largest_score_is_found_beside_the_kernels(pool):
    assert pool(2, largest_scores, Layout.zigzag([0, 9, 20], 2)) == [True, True]


def run_mixed(group, case):
    """The call, with ATen for blocks without cut pieces, as CUDA has it by default."""

    def backend(q, k, v, slices, options):
        name = "aten" if varlen_work(slices).remaining is None else "triton"
        return load_backend("softmax", name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attend, "choose_backend", backend)
        return run(group, case)


def test_blocks_may_have_different_backends(pool):
    layout = Layout.striped([0, 50, 70], 3, 4)
    case = Case("ring", layout, causal=True, sinks=True, **OPTIONS | {"dtype": torch.float32})
    assert_right(pool(3, run_mixed, case)[0], oracle(case), case.dtype, roundings=8)


def run_in_head_groups(group, case):
    """The call in groups of one KV head, as on ranks with many rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(key_plan, "_ROWS_PER_SHORT_GROUP", 8)
        return run(group, case)


def test_heads_may_be_computed_in_groups(pool):
    options = OPTIONS | {"dtype": torch.float32, "heads": 4, "kv_heads": 2, "batch": 2}
    case = Case("ring", Layout.zigzag([0, 20, 50], 2), causal=True, sinks=True, **options)
    assert_right(pool(2, run_in_head_groups, case)[0], oracle(case), case.dtype, roundings=8)


def test_infinite_sinks_and_rows_without_keys():
    with use_backend("triton"):
        assert_infinite_sinks_are_limits("ring", torch.float32, ranks=1)


def special_values(group, place, value, options):
    """The results of a call with a NaN or an infinity, of which numpy warns in the interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tensors, layout = inputs(40, place, value, dim=16), Layout.contiguous(40, group.size())
        return attention(group, "ring", layout, tensors, "triton", options, place == "sinks")


@few_rows()
@pytest.mark.parametrize("place", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("mask", MASKS)
def test_nan_and_infinities_are_not_lost(pool, place, value, mask):
    """Out also gets them in rows of the same tile that do not attend to such a value."""
    right = expected(inputs(40, place, VALUES[value], dim=16), MASKS[mask], place == "sinks")
    for results in pool(2, special_values, place, VALUES[value], MASKS[mask]):
        assert_alike(results, right, torch.float32, {"lse": THE_SAME_PLACES})


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_of_any_sign(pool, scale):
    layout = Layout.zigzag([0, 30, 70], 2)
    case = Case("ring", layout, causal=True, scale=scale, **OPTIONS | {"dtype": torch.float32})
    assert_right(pool(2, run, case)[0], oracle(case), case.dtype, roundings=8)


def test_cross_attention(pool):
    layout, kv_layout = Layout.zigzag([0, 20, 50], 2), Layout.contiguous([0, 64, 100], 2)
    case = Case("ring", layout, causal=True, kv_layout=kv_layout, dtype=torch.float32, **OPTIONS)
    assert_right(pool(2, run, case)[0], oracle(case), case.dtype, roundings=8)


@pytest.mark.parametrize("tokens", [128, pytest.param(1024, marks=pytest.mark.exhaustive)])
def test_error_grows_at_most_by_a_third(pool, tokens):
    """The design's rule: at most 1.35 times the one-device kernel's RMS error."""
    ranks, options = 4, OPTIONS | {"heads": 1, "kv_heads": 1, "dtype": torch.float16}
    case = Case("ring", Layout.zigzag([0, tokens], ranks), causal=True, **options)
    expected, together = oracle(case), pool(ranks, run, case)[0]
    alone = pool(1, run, dataclasses.replace(case, layout=Layout.contiguous([0, tokens], 1)))[0]
    for name, x, y, z in zip(NAMES, together, expected, alone, strict=False):
        assert rms(x - y) <= 1.35 * rms(z - y), name


def launches(group, case):
    """How many kernels a forward launches on this rank, by name."""
    counts, original = {}, fused.kernels.forward_block

    def counted(*arguments, **options):
        counts["hops"] = counts.get("hops", 0) + 1
        counts["launches"] = counts.get("launches", 0) + len(arguments[3])
        assert len(arguments[3]) <= 2
        return original(*arguments, **options)

    fused.kernels.forward_block = counted
    try:
        run(group, case)
    finally:
        fused.kernels.forward_block = original
    return counts


def test_ring_of_any_length_needs_no_merge_kernel(pool):
    """A hop is one launch, and none else touches the result."""
    case = Case("ring", Layout.zigzag([0, 96], 4), causal=True, dtype=torch.float32, **OPTIONS)
    assert pool(4, launches, case) == [{"hops": 4, "launches": 4}] * 4


def test_tables_are_built_once(pool):
    assert pool(2, tables_built) == [0, 0]


def tables_built(group):
    """How many tables a second call over the same layout builds."""
    layout = Layout.zigzag([0, 40], 2)
    attn = make_attention("ring", group)
    q = torch.randn(20, 2, 16, requires_grad=True)
    built, kernels = [], fused.kernels
    originals = kernels.forward_launches, kernels.backward_launches
    for _ in range(2):
        built.clear()
        kernels.forward_launches = lambda *a, f=originals[0]: (built.append(1), f(*a))[1]
        kernels.backward_launches = lambda *a, f=originals[1]: (built.append(1), f(*a))[1]
        with use_backend("triton"):
            attn(q, q, q, layout, causal=True).sum().backward()
    kernels.forward_launches, kernels.backward_launches = originals
    return len(built)


def refused(group, dtype, dims, interpret):
    attn, layout = make_attention("ring", group), Layout.zigzag(8, 2)
    q, v = torch.zeros(4, 1, dims[0], dtype=dtype), torch.zeros(4, 1, dims[1], dtype=dtype)
    triton.knobs.runtime.interpret = interpret
    before = attn.sent_bytes
    try:
        with use_backend("triton"), pytest.raises(ValueError, match='backend "triton"') as error:
            attn(q, q, v, layout, causal=True)
        with use_backend("triton"):
            assert attn.unsupported(q, q, v, layout, causal=True) == str(error.value)
    finally:
        triton.knobs.runtime.interpret = True
    assert attn.sent_bytes == before
    return str(error.value)


@pytest.mark.parametrize(("dtype", "dims", "interpret", "words"), TRITON_REFUSES)
def test_unsupported_calls_are_refused_before_sending(pool, dtype, dims, interpret, words):
    for message in pool(2, refused, dtype, dims, interpret):
        assert words in message
