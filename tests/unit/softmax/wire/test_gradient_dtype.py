"""Gradients that travel in bf16: their error, their bytes, and refusals."""

import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.wire import row_messages
from tests.support.calls import sent_bytes
from tests.support.cases import Case, begin, module, visible
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

BF16 = {"gradient_dtype": torch.bfloat16}
CU = [0, 60, 61, 130]
SHAPE = {"heads": 4, "kv_heads": 2, "dtype": torch.float32}
# Which of dq, dk and dv are sums of contributions that travel.
TRAVELLING = {
    "ring": "kv", "all_gather": "kv", "usp": "kv", "token_ring": "q", "mesh": "qkv",
    "usp+token_ring": "q",
}  # fmt: skip


def gradients(comm, case):
    outputs, leaves = begin(comm, case)
    out, dout = outputs["out"]
    out.backward(dout)
    return [case.layout.unshard(leaves[name].grad, comm) for name in "qkv"]


def sizes_of_contributions(case):
    """The sums of the absolute values of what each rank's rows contribute to dq, dk and dv."""
    layout = case.layout
    q, k, v, _, dout, _ = (None if x is None else x.double() for x in case.inputs())
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    seen = torch.from_numpy(visible(layout.cu_seqlens, layout.cu_seqlens, True, (-1, -1), None))
    scores = torch.einsum("ihd,jhd->hij", q, k) * case.dim**-0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", p, v)
    ds = torch.einsum("ihd,jhd->hij", dout, v) - (out * dout).sum(-1).T[..., None]
    ds = p * ds * case.dim**-0.5
    sizes = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(layout.ranks):
        rows = layout.token_indices(rank)
        sizes[0] += torch.einsum("hij,jhd->ihd", ds[:, :, rows], k[rows]).abs()
        sizes[1] += torch.einsum("hij,ihd->jhd", ds[:, rows], q[rows]).abs()
        sizes[2] += torch.einsum("hij,ihd->jhd", p[:, rows], dout[rows]).abs()
    by_kv_heads = lambda x: x.unflatten(1, (case.kv_heads, -1)).sum(2)  # noqa: E731
    return [sizes[0], by_kv_heads(sizes[1]), by_kv_heads(sizes[2])]


@few_rows()
@pytest.mark.parametrize("strategy", TRAVELLING)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_errors_are_at_most_as_stated(monkeypatch, kind, strategy):
    """1/256 of the contributions, which are 1/2^24 more or less; without the option's rounding an
    error of fp32 remains. What does not travel is the same."""
    monkeypatch.setattr(row_messages, "_MAX_CAST_ROWS", 4)
    case = Case(strategy, getattr(Layout, kind)(CU, 4), causal=True, **SHAPE)
    rounded = Case(strategy, case.layout, True, **SHAPE, module_options=tuple(BF16.items()))
    exact, found = (virtual(4, gradients, x)[0] for x in (case, rounded))
    for name, x, y, size in zip("qkv", exact, found, sizes_of_contributions(case), strict=True):
        if name in TRAVELLING[strategy]:
            error = (x - y).abs()
            assert (error <= size / 256 + 1e-6 * size.max()).all()
            assert error.max() > 1e-4 * size.max()
        else:
            assert torch.equal(x, y)


def traffic_and_sent(comm, case):
    attn = module(case.strategy, comm, **BF16)
    q, k, v = (case.layout.shard(x, comm.rank, 1) for x in case.inputs()[:3])
    rows = attn.traffic(q, k, v, case.layout, causal=False)
    passes = ("forward", "backward")
    traffic = [sum(x.bytes for x in rows if x.direction == way) for way in passes]
    return traffic, sent_bytes(comm, case, **BF16)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh"])
def test_bytes_match_traffic_and_the_formula(strategy):
    ranks, b = (4 if strategy == "mesh" else 3), 4
    shape = {"causal": False, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 16, "batch": 2}
    case = Case(
        strategy, Layout.contiguous(10 * ranks, ranks), dtype=torch.float32, **shape,
        module_options=tuple(BF16.items()),
    )  # fmt: skip
    key_peers, query_peers = {"token_ring": (0, 2), "mesh": (1, 1)}.get(strategy, (2, 0))
    keys, queries = key_peers * 10 * 2 * 2, query_peers * 10 * 2 * 4  # rows, times heads
    expected = [keys * (8 + 16) * b + queries * (8 * b + 16 * 4 + 4)]
    expected.append(keys * (8 + 16) * (b + 2) + queries * ((8 + 16) * b + 8 + 8 * 2))
    for traffic, sent in virtual(ranks, traffic_and_sent, case):
        assert traffic == sent == expected


@few_rows(pairs=False)
@pytest.mark.parametrize("value", ["bf16", torch.float16, torch.float32, 16, torch.zeros(2)])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh", "usp"])
def test_other_dtypes_are_refused(strategy, value):
    with pytest.raises(ValueError, match=r"^gradient_dtype must be None or torch.bfloat16, got"):
        module(strategy, Comm("silent", 0, 4), gradient_dtype=value)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh", "usp"])
def test_what_asks_for_digits_is_refused(strategy):
    x, layout = torch.zeros(2, 2, 8, dtype=torch.float64), Layout.contiguous(8, 4)
    attn = module(strategy, Comm("silent", 0, 4), **BF16)
    with pytest.raises(ValueError, match=r"^gradient_dtype must be None with fp64"):
        attn(x, x, x, layout, causal=True)
    with pytest.raises(ValueError, match=r"^(gradient_dtype|deterministic) must"):
        module(strategy, Comm("silent", 0, 4), **BF16, deterministic="ranks")


@pytest.mark.parametrize("strategy", ["ulysses", "disaggregated"])
def test_other_strategies_have_no_such_option(strategy):
    with pytest.raises(TypeError, match="gradient_dtype is not an option"):
        seqpar.make_attention(strategy, Comm("silent", 0, 4), **BF16)
