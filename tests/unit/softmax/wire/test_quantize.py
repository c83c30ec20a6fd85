"""Messages in 8 bits: how far they err, what is computed with them, their bytes, and refusals."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.wire.message_dtypes import CODES, decode, encode, encoded_width
from seqpar.strategies.mesh import Mesh
from tests.support.calls import sent_bytes
from tests.support.cases import Case, begin, module, visible
from tests.support.pages import ROOT, table_of
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

FP8 = torch.float8_e4m3fn
INT8 = {"message_dtype": torch.int8}
EIGHT_BITS = [
    (strategy, {name: code})
    for code in CODES
    for strategy, name in (("ring", "message_dtype"), ("token_ring", "partial_dtype"))
]
LAYOUT = Layout.zigzag([0, 60, 61, 130], 3)
each_code = pytest.mark.parametrize("code", CODES, ids=str)


def most_error(x, code):
    """A bound on the error of each element of rows x. With s = largest / 448, an e4m3 code from
    1/64 on is rounded to 3 bits after its first, by at most 1/16 of it, and a smaller one to a
    multiple of 1/512."""
    x = x.double().abs()
    largest = x.amax(-1, keepdim=True)
    if code == torch.int8:
        return (largest / 254).expand_as(x)
    return (x / 16).clamp_min(largest / 448 / 1024)


@few_rows()
@each_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(8, 8), (5, 2), (1, 3)])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_elements_err_at_most_as_stated(rows, dims, dtype, code):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 2, sum(dims), generator=generator) * torch.logspace(-5, 4, 2)[:, None]
    x[1:3, :, 1] = 0.0
    x = x.to(dtype)
    message = encode(x, dims, code)
    assert message.dtype == torch.int8 and message.shape == (rows, 1, 2, encoded_width(dims))
    for part, found in zip(x.split(dims, -1), decode(message, dims, code, dtype), strict=True):
        rounding = torch.finfo(dtype).eps * part.double().abs() + torch.finfo(dtype).tiny
        limit = most_error(part, code) * 1.001 + rounding
        assert found.dtype == dtype
        assert ((found.double() - part.double()).abs() <= limit).all()


@each_code
def test_a_value_not_finite_makes_its_row_nan(code):
    x = torch.ones(3, 1, 1, 4)
    x[0, ..., 1], x[1, ..., 0] = torch.inf, torch.nan
    first, second = decode(encode(x, [2, 2], code), [2, 2], code, torch.float32)
    assert first[:2].isnan().all() and not first[2].isnan().any()
    assert not second.isnan().any()


@each_code
@pytest.mark.parametrize("largest", [8e-43, 1e-38, 1.0, torch.finfo(torch.float32).max])
def test_the_largest_elements_stay_finite(largest, code):
    """A subnormal scale, 1.27 steps rounded to 1, gives quotients above the largest code."""
    x = torch.rand(100_000, 1, generator=torch.Generator().manual_seed(0)).mul_(largest)
    (found,) = decode(encode(x, [1], code), [1], code, torch.float32)
    assert ((found - x).abs() <= 1e-6 * x + 1e-42).all()  # 1e-42: 448 steps of the least scale


@each_code
@pytest.mark.parametrize("outlier", ["no outlier", "12", "30", "100"])
def test_errors_beside_outliers_are_those_documented(outlier, code):
    column = list(CODES).index(code)
    table = table_of(ROOT / "docs/internals/numerics.md", "largest over RMS")
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    if outlier.isdecimal():
        x[:, 0] = float(outlier)
    (found,) = decode(encode(x, [128], code), [128], code, torch.float32)
    error = (found - x)[:, 1:].square().mean().sqrt()
    assert error == pytest.approx(float(table[outlier][column]), rel=0.03)  # 2 digits


@few_rows()
@pytest.mark.parametrize(("strategy", "kv_heads", "code"), [
    *(("ring", kv_heads, code) for kv_heads in (2, 1) for code in CODES),
    *((strategy, 2, torch.int8) for strategy in ("all_gather", "usp", "usp+all_gather", "mesh")),
    *((strategy, 1, FP8) for strategy in ("all_gather", "usp", "usp+all_gather", "mesh")),
])  # fmt: skip
def test_others_keys_are_those_decoded(strategy, kv_heads, code):
    """Out and gradients are, to fp32's rounding, those of attention in which each rank (of USP
    and a mesh, each row) has its own keys exactly, and others' as 8 bits say."""
    two_dimensional = strategy.startswith(("usp", "mesh"))
    layout = Layout.zigzag([0, 60, 61, 130], 4) if two_dimensional else LAYOUT
    ranks = layout.ranks
    shape = {"heads": 2, "kv_heads": kv_heads, "dtype": torch.float32}
    options = {"module_options": (("message_dtype", code),)}
    case = Case(strategy, layout, causal=True, **shape, **options)

    def call(comm):
        outputs, leaves = begin(comm, case)
        out, dout = outputs["out"]
        out.backward(dout)
        found = [out.detach(), *(leaves[name].grad for name in "qkv")]
        return [layout.unshard(x, comm) for x in found]

    found = virtual(ranks, call)[0]
    q, k, v, _, dout, _ = case.inputs()
    decoded = decode(encode(torch.cat([k, v], -1), [8, 8], code), [8, 8], code, torch.float32)
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    seen = torch.from_numpy(visible(layout.cu_seqlens, layout.cu_seqlens, True, (-1, -1), None))
    expected = torch.zeros(found[0].shape, dtype=torch.float64)
    together = 2 if two_dimensional else 1
    for first in range(0, ranks, together):
        own = torch.from_numpy(
            np.concatenate([layout.token_indices(first + i).numpy() for i in range(together)])
        )
        others = torch.ones(layout.tokens, 1, 1)
        others[own] = 0
        keys, values = (
            (x + others * (y.double() - x).detach()).repeat_interleave(2 // kv_heads, 1)
            for x, y in zip((k, v), decoded, strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q[own], keys) * 8**-0.5
        weights = scores.masked_fill(~seen[own], -torch.inf).softmax(-1)
        expected = expected.index_add(0, own, torch.einsum("hij,jhd->ihd", weights, values))
    expected.backward(dout.double())
    for x, y in zip(found, [expected.detach(), q.grad, k.grad, v.grad], strict=True):
        assert (x - y).abs().max() < 5e-6 * max(1.0, y.abs().max())


@pytest.mark.parametrize(("strategy", "options"), [*EIGHT_BITS, ("all_gather", INT8)])
def test_out_errs_as_derived(strategy, options):
    """Scores that change by at most δ change weights by a factor within e^±2δ, and values change as
    bounded; a partial's out does too, and is weighted by at most 1."""
    shape = {"causal": False, "heads": 2, "kv_heads": 2, "dtype": torch.float32}

    def call(comm, chosen):
        case = Case(strategy, LAYOUT, **shape, module_options=tuple(chosen.items()))
        outputs, _ = begin(comm, case)
        return LAYOUT.unshard(outputs["out"][0].detach(), comm)

    exact, found = (virtual(3, call, chosen)[0] for chosen in ({}, options))
    q, k, v, *_ = Case(strategy, LAYOUT, **shape).inputs()
    ((name, code),) = options.items()
    bound = most_error(v, code).max()
    if name == "message_dtype":
        delta = q.abs().sum(-1).max() * most_error(k, code).max() * 8**-0.5
        bound = bound + torch.expm1(2 * delta) * v.abs().max()
    error = (found - exact).abs().max()
    assert 1e-5 < error < bound


@few_rows()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("strategy", "chosen"), [*EIGHT_BITS, ("all_gather", INT8)])
def test_bytes_match_traffic_and_the_formula(strategy, chosen, dtype):
    options = tuple(chosen.items())
    shape = {"causal": False, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 16, "batch": 2}
    layout = Layout.contiguous(30, 3)
    case = Case(strategy, layout, dtype=dtype, **shape, module_options=options)

    def said(comm):
        attn = module(strategy, comm, **dict(options))
        q, k, v = (layout.shard(x, comm.rank, 1) for x in case.inputs()[:3])
        rows = attn.traffic(q, k, v, layout, causal=False)
        passes = ("forward", "backward")
        return [sum(x.bytes for x in rows if x.direction == way) for way in passes]

    def sent(comm):
        return sent_bytes(comm, case, **dict(options))

    keys = 2 * 10 * 2 * 2 * (8 + 16 + 8)  # two peers, rows, batch, KV heads
    gradients = 2 * 10 * 2 * 2 * (8 + 16) * 4
    expected = [keys, keys + gradients]
    if strategy == "token_ring":
        rows = 2 * 10 * 2 * 4
        expected = [rows * (8 * dtype.itemsize + 16 + 4 + 4)]
        expected.append(rows * ((8 + 16) * dtype.itemsize + 8 + 8 * 4))
    for one, other in zip(virtual(3, said), virtual(3, sent), strict=True):
        assert one == other == expected


@each_code
def test_a_meshs_bytes_are_those_of_traffic(code):
    """Each rank sends its keys once, in 8 bits, and its queries once, as they are."""
    messages = {"message_dtype": code}
    layout = Layout.contiguous(32, 4)
    shape = {"causal": False, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 16, "batch": 2}
    case = Case(
        "mesh", layout, dtype=torch.float32, **shape, module_options=tuple(messages.items())
    )

    def said_and_sent(comm):
        attn = module("mesh", comm, **messages)
        q, k, v = (layout.shard(x, comm.rank, 1) for x in case.inputs()[:3])
        rows = attn.traffic(q, k, v, layout, causal=False)
        passes = ("forward", "backward")
        said = [sum(x.bytes for x in rows if x.direction == way) for way in passes]
        return said, sent_bytes(comm, case, **messages)

    keys, forward = 8 * 2 * 2 * (8 + 16 + 8), 8 * 2 * 4 * (8 + 16 + 1) * 4
    backward = 8 * 2 * 2 * (8 + 16) * 4 + 8 * 2 * 4 * (8 + 16 + 2 + 8) * 4
    for said, sent in virtual(4, said_and_sent):
        assert said == sent == [keys + forward, keys + backward]


@pytest.mark.parametrize(
    "value", ["int8", torch.uint8, torch.float8_e5m2, torch.bfloat16, 8, torch.zeros(2)]
)
def test_other_dtypes_are_refused(value):
    with pytest.raises(
        ValueError, match=r"^message_dtype must be None or torch.int8 or torch.float8"
    ):
        module("ring", Comm("silent", 0, 2), message_dtype=value)
    with pytest.raises(
        ValueError, match=r"^message_dtype must be None or torch.int8 or torch.float8"
    ):
        Mesh(message_dtype=value)


@pytest.mark.parametrize(("strategy", "options"), EIGHT_BITS)
def test_what_asks_for_digits_is_refused(strategy, options):
    (name,) = options
    x, layout = torch.zeros(4, 1, 8, dtype=torch.float64), Layout.contiguous(8, 2)
    attn = module(strategy, Comm("silent", 0, 2), **options)
    with pytest.raises(ValueError, match=f"^{name} must"):
        attn(x, x, x, layout, causal=True)
    with pytest.raises(ValueError, match=r"^(message_dtype|deterministic) must"):
        module(strategy, Comm("silent", 0, 2), **options, deterministic="ranks")
