"""How rounding errors grow with ranks, beside those of one device and of eager PyTorch."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.compute.partial import Partial
from tests.support.cases import (
    STRATEGIES,
    Case,
    by_documents,
    module,
    on_one_rank,
    oracle,
    rms,
    run,
    visible,
)
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@functools.cache
def _on_one_device(case):
    return virtual(1, run, on_one_rank(case))[0]


def on_one_device(case):
    """What `run` returns on one rank, where every strategy is one call of the same kernel."""
    return _on_one_device(by_documents(case, strategy="ring", module_options=()))


def worst_ratio(case, ranks):
    """RMS error against fp64, over that of the same backend and dtype on one device: the largest of
    all results."""
    expected, alone = oracle(case), on_one_device(case)
    together = virtual(ranks, run, case)[0]
    return max(rms(x - y) / rms(z - y) for x, y, z in zip(together, expected, alone, strict=True))


@few_rows()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_error_grows_at_most_by_a_third(strategy, dtype, backend, ranks):
    """The design's rule: at most 1.35 times the RMS error of the one-device kernel, at 1,024 tokens
    and up to 16 ranks."""
    cu = [0, 700, 724, 1024]
    make = {2: Layout.zigzag, 8: Layout.striped, 16: Layout.zigzag}[ranks]
    options = {
        "heads": 4,
        "kv_heads": 2,
        "dim": 32,
        "value_dim": 32,
        "dtype": dtype,
        "backend": backend,
    }
    window = (-1, -1) if ranks != 8 else (300, 0)
    assert (
        worst_ratio(Case(strategy, make(cu, ranks), causal=True, window=window, **options), ranks)
        <= 1.35
    )


@few_rows()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_error_grows_by_a_third_after_one_rounding(dtype, causal):
    """Multi-head attention over 1,024 tokens on 2 ranks: contributions to dk and dv that were
    rounded before they are summed would come to √2 times one device's error."""
    case = Case(
        "ring", Layout.zigzag(1024, 2), causal, kv_heads=2, dim=64, value_dim=64, dtype=dtype
    )
    assert worst_ratio(case, 2) <= 1.35


# All scores are about 20, 1,000 and 100,000, and differ by about 1% or less.
COMMON = [(x / 8) ** 0.5 for x in (20, 1e3, 1e5)]
LARGE_SCORES = {"dim": 64, "value_dim": 64, "dtype": torch.float32}
MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
}


@few_rows()
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize(("strategy", "backend"), [
    ("ring", "aten"), ("ring", "reference"), ("all_gather", "aten"), ("usp", "aten"),
])  # fmt: skip
@pytest.mark.parametrize("mask", MASKS)
def test_large_scores_keep_the_error(strategy, backend, ranks, common, mask):
    """Weights of partials depend on digits of lse that fp32 has no room for beside a large score.
    Wrong weights would show in dq, which then gets a multiple of what all keys have in common."""
    options = MASKS[mask] | LARGE_SCORES | {"common": common, "backend": backend}
    case = Case(strategy, Layout.zigzag([0, 200, 256], ranks), heads=4, kv_heads=2, **options)
    assert worst_ratio(case, ranks) <= 1.35


def test_alibi_with_scores_of_1000_at_most_doubles_the_error():
    """The limit in numerics.md."""
    options = LARGE_SCORES | {"alibi": "heads", "common": COMMON[1]}
    case = Case("ring", Layout.zigzag([0, 200, 256], 2), causal=True, heads=4, **options)
    assert worst_ratio(case, 2) <= 2


@few_rows()
@pytest.mark.parametrize(("strategy", "ranks"), [
    ("token_ring", 2), ("token_ring", 4), ("mesh", 4), ("usp+token_ring", 4),
    ("disaggregated+at random", 4),
])  # fmt: skip
@pytest.mark.parametrize("common", COMMON)
def test_an_fp32_lse_that_travels_adds_at_most_its_rounding(strategy, ranks, common):
    """The limit in numerics.md, row by row of dq."""
    layout = Layout.contiguous(256, ranks)
    case = Case(strategy, layout, causal=False, heads=4, kv_heads=4, common=common, **LARGE_SCORES)
    q, k, v, _, dout, _ = (None if x is None else x.double() for x in case.inputs())
    scores = torch.einsum("nhd,mhd->hnm", q, k) / 8
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    mean_key = torch.einsum("hnm,mhd->hnd", weights, k).norm(dim=-1)
    of_keys = torch.einsum("nhd,mhd->hnm", dout, v)
    delta = (weights * of_keys).sum(-1)
    of_ranks = [
        (x.softmax(-1) * y).sum(-1) - delta
        for x, y in zip(scores.chunk(ranks, -1), of_keys.chunk(ranks, -1), strict=True)
    ]
    spread = torch.stack(of_ranks).abs().amax(0)
    added = (mean_key * spread * lse * 2**-24 / 8).square().mean().sqrt() / 8
    got, alone, expected = (
        x[2] for x in (virtual(ranks, run, case)[0], on_one_device(case), oracle(case))
    )
    assert rms(got - expected) <= 1.35 * rms(alone - expected) + float(added)


HALF_WITH_DLSE = {"causal": True, "scale": 0.02, "dtype": torch.float16}


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "disaggregated+at random"])
def test_gradients_of_lse_may_exceed_fp16(strategy, backend):
    """A loss scaler begins with 65,536, so `lse.sum()` has a gradient that fp16 cannot hold."""
    layout, size = Layout.zigzag([0, 40, 64], 2), 2.0**17
    case = Case(strategy, layout, dlse=size, backend=backend, **HALF_WITH_DLSE)
    for x, y in zip(virtual(2, run, case)[0], oracle(case), strict=True):
        assert rms(x - y) <= 2 * torch.finfo(case.dtype).eps * rms(y)


def test_gradients_of_lse_keep_their_digits_in_fp16():
    """Rounding dlse and then dq would come to √2 times the error of rounding dq alone."""
    case = Case("ring", Layout.zigzag(512, 2), dlse=1e4, dim=64, value_dim=64, **HALF_WITH_DLSE)
    got, expected = virtual(2, run, case)[0][2], oracle(case)[2]
    assert rms(got - expected) <= 1.2 * rms(expected.astype(np.float16) - expected)


def exact_and_on_wire(strategy, causal, option):
    """A call of 8 ranks, without and with an option that sends something in bf16."""
    case = Case(
        strategy,
        Layout.zigzag(1024, 8),
        causal,
        kv_heads=2,
        dim=32,
        value_dim=32,
        dtype=torch.bfloat16,
        backend="reference",  # ATen's own partials are in bf16 on CPUs with AMX
    )
    return case, dataclasses.replace(case, module_options=((option, torch.bfloat16),))


@pytest.mark.parametrize("causal", [True, False])
def test_partials_in_bf16_at_most_double_the_variance(causal):
    """Each is rounded once, as finely as the result; together, weighted by shares of 1, they add no
    more than that does."""
    case, on_wire = exact_and_on_wire("token_ring", causal, "partial_dtype")
    expected = oracle(case)[0]
    exact, rounded = (rms(virtual(8, run, x)[0][0] - expected) for x in (case, on_wire))
    assert exact < rounded <= 2**0.5 * exact


@few_rows()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "token_ring"])
def test_gradients_in_bf16_at_most_double_the_variance(strategy, causal):
    """Contributions of different ranks are hardly correlated: their variances add to the sum's."""
    case, on_wire = exact_and_on_wire(strategy, causal, "gradient_dtype")
    parts = (3, 4) if strategy == "ring" else (2,)  # dk and dv, or dq
    exact, rounded = (virtual(8, run, x)[0] for x in (case, on_wire))
    for part in parts:
        one, other = (rms(x[part] - oracle(case)[part]) for x in (exact, rounded))
        assert one < other <= 2**0.5 * one


@pytest.mark.parametrize(
    ("dtype", "backend", "common"),
    [
        (torch.float32, "aten", 0.0),
        (torch.bfloat16, "aten", 0.0),
        (torch.float32, "aten", COMMON[1]),
        (torch.float32, "reference", COMMON[1]),
    ],
)
def test_one_device_error_is_within_twice_eagers(dtype, backend, common):
    case = Case(
        "ring",
        Layout.contiguous([0, 700, 1024], 1),
        causal=True,
        heads=4,
        kv_heads=2,
        dim=64,
        value_dim=64,
        dtype=dtype,
        backend=backend,
        common=common,
    )
    expected, ours = oracle(case), virtual(1, run, case)[0]
    q, k, v, _, dout, _ = case.inputs()
    seen = torch.from_numpy(
        visible(case.layout.cu_seqlens, case.layout.cu_seqlens, True, (-1, -1), None)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    k_heads, v_heads = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k_heads.transpose(1, 2) * 64**-0.5).masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ v_heads).transpose(0, 1)
    out.backward(dout)
    eager = [x.double().detach().numpy() for x in (out, q.grad, k.grad, v.grad)]
    for x, y, z in zip([ours[0], *ours[2:]], [expected[0], *expected[2:]], eager, strict=True):
        assert rms(x - y) <= 2 * rms(z - y)


@pytest.mark.parametrize("ranks", [8, 16])
def test_the_error_rule_notices_partials_in_bf16(monkeypatch, ranks):
    """Merged hop by hop in bf16, as published rings do, the same call breaks the rule."""
    options = {"heads": 2, "kv_heads": 1, "dim": 32, "value_dim": 32, "dtype": torch.bfloat16}
    case = Case("ring", Layout.zigzag(1024, ranks), causal=False, **options)
    on_one_device(case)  # before what follows
    merge = Partial.merge

    def rounded(self, rows, out, lse, is_owned=False):
        merge(self, rows, out, lse, is_owned)
        self.out[:, rows] = self.out[:, rows].bfloat16().to(self.out.dtype)

    monkeypatch.setattr(Partial, "merge", rounded)
    assert worst_ratio(case, ranks) > 1.35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partials_may_travel_in_half_precision(dtype):
    """With fp64 inputs all that is lost is what the wire's dtype rounds: half a unit in the last
    place of each partial."""
    case = Case(
        "token_ring", Layout.zigzag(200, 4), causal=True, module_options=(("partial_dtype", dtype),)
    )
    expected, got = oracle(case), virtual(4, run, case)[0]
    error = np.abs(got[0] - expected[0])
    assert 0 < error.max() <= torch.finfo(dtype).eps / 2 * np.abs(case.inputs()[2].numpy()).max()
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["token_ring", "mesh"])
def test_partials_in_fp64_are_refused_with_smaller_dtypes(strategy):
    """They would have no more digits, and kernels on GPUs write no fp64."""
    x, layout = torch.zeros(2, 2, 8), Layout.contiguous(8, 4)
    attn = module(strategy, Comm("silent", 0, 4), partial_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^partial_dtype must not be torch.float64 with torch.fl"):
        attn(x, x, x, layout, causal=True)
