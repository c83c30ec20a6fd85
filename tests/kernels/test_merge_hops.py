"""The kernels that merge the results of hops and add gradients to sums, against plain PyTorch."""

import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import launching

from seqpar import Layout
from seqpar.softmax.backends import flash_attn
from seqpar.softmax.compute import waiting_results
from seqpar.softmax.compute.partial import OutputGradient, Partial, QuerySums
from seqpar.softmax.keys import key_plan
from seqpar.softmax.queries import tile_strategy
from seqpar.softmax.wire.row_messages import Rows
from tests.kernels.flash_cases import DEVICE
from tests.support import varlen_kernels
from tests.support.cases import Case, assert_right, backward, begin, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows
from tests.tools.aot import TARGETS

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
import itertools
import re

import triton
from seqpar.kernels.flash_attention.merge_hops import flash_add_to_rows, flash_merge_hops
from triton.compiler import ASTSource

from tests.tools import sass
from tests.tools.aot import TARGETS

TYPES = {"part": "*bf16", "total": "*fp32", "index": "*i64", "out": "*bf16", "lse": "*fp32"}
TYPES |= {"partial_out": "*fp32", "partial_lse": "*fp64", "sinks": "*fp32"}
TYPES |= {f"{x}{i}": TYPES.get(x, "*i32") for x in ("out", "lse", "place") for i in range(8)}
kernels = flash_merge_hops, flash_add_to_rows
for name, target in TARGETS.items():
    for kernel, dim in itertools.product(kernels, (64, 256)):
        elements = 2048 if kernel is flash_merge_hops else 4096
        known = {"DV": dim, "BLOCK_DV": dim, "TILE_ROWS": elements // dim}
        known |= {"HAS_LSE": True, "HAS_PARTIAL": True, "HAS_SINKS": True, "ONLY_ROWS": False}
        known = {name: x for name, x in known.items() if name in kernel.arg_names}
        kinds = {x: "constexpr" if x in known else TYPES.get(x, "i32") for x in kernel.arg_names}
        positions = {(kernel.arg_names.index(name),): x for name, x in known.items()}
        names = re.compile("[opz]_.*|(partial_)?out.*|part|total")  # all out, and its strides
        aligned = [i for i, x in enumerate(kernel.arg_names) if names.fullmatch(x)]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=positions, attrs=attributes)
        options = {"num_warps": 4, "num_stages": 1}
        asm = triton.compile(source, target=target, options=options).asm
        spilled = sass.usage(asm["cubin"])["spilled"] if target.backend == "cuda" else 0
        print(name, kernel.__name__, dim, spilled)
"""
INDEX = torch.tensor([3, 0, 7, 8, 9], device=DEVICE)


def drawn(rows, value_dim, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(rows)
    out = torch.randn(batch, rows, 3, value_dim, generator=generator).to(DEVICE, dtype)
    lse = 20 * torch.randn(batch, 3, rows, generator=generator)
    lse[:, 1, ::4] = -torch.inf
    return out, lse.to(DEVICE).transpose(1, 2)  # heads before rows, as varlen kernels have it


merge_hops = importlib.import_module("seqpar.kernels.flash_attention.merge_hops")
ROWS = 11  # of a partial result
RANGES = {  # of rows that a hop has
    "range": [[4, 9]],
    "all": [[0, ROWS]],
    "last": [[5, ROWS]],
    "index": [[0, 1], [3, 4], [7, 10]],
    "other index": [[1, 3], [8, 11]],
}
MANY = [*RANGES, *RANGES, "all", "index"]  # more than one launch merges


def rows_of(name):
    return Rows(np.array(RANGES[name]))


def hop(name, seed, dtype=torch.bfloat16, value_dim=16, batch=2):
    """Return the rows, out and lse of a hop; out and lse are laid out as varlen kernels do."""
    rows, generator = rows_of(name), torch.Generator().manual_seed(seed)
    out = torch.randn(batch, rows.count, 3, value_dim + 1, generator=generator)
    lse = 20 * torch.randn(3, batch, rows.count, generator=generator)
    lse[1, :, ::2] = -torch.inf
    out[:, ::2, 1] = 0
    return rows, out[..., 1:].to(DEVICE, dtype), lse.to(DEVICE).permute(1, 2, 0)


def place(rows):
    return rows.place(ROWS, DEVICE)


def nothing(batch=2, value_dim=16):
    out = torch.zeros(batch, ROWS, 3, value_dim, device=DEVICE)
    return out, torch.full(out.shape[:3], -torch.inf, dtype=torch.float64, device=DEVICE)


def one_by_one(hops, sums):
    """Merge hops into sums one after another, each in place."""
    for rows, out, lse in hops:
        kernels.merge_hops([kernels.HopResult(out, lse, place(rows))], *sums, *sums)
    return sums


def at_once(hops, out, lse, *partial_and_sinks):
    results = [kernels.HopResult(out, lse, place(rows)) for rows, out, lse in hops]
    kernels.merge_hops(results, out, lse, *partial_and_sinks)
    return out, lse


def assert_same_bits(found, expected):
    """Assert that results are equal, or are the expected ones rounded once to a smaller dtype."""
    for x, y in zip(found, expected, strict=True):
        if x.dtype == torch.bfloat16 and y.dtype == torch.float32 and DEVICE.type == "cpu":
            y = (y.view(torch.int32) & -0x10000).view(torch.float32)  # Triton's interpreter cuts
        torch.testing.assert_close(x, y.to(x.dtype), rtol=0, atol=0, equal_nan=True)


@few_rows()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value_dim", [16, 20])
def test_equals_the_merge_in_torch(monkeypatch, dtype, name, value_dim):
    sums = [one_by_one([hop("all", 1, dtype, value_dim)], nothing(2, value_dim)) for _ in range(2)]
    sums[0][0][:, ::3, 1] = sums[1][0][:, ::3, 1] = 0
    sums[0][1][:, ::3, 1] = sums[1][1][:, ::3, 1] = -torch.inf
    monkeypatch.setattr(torch.Tensor, "is_cuda", False, raising=False)  # the merge in PyTorch
    expected = Partial.of(*sums[0])
    expected.merge(*hop(name, 2, dtype, value_dim))
    found = one_by_one([hop(name, 2, dtype, value_dim)], sums[1])
    torch.testing.assert_close(found[0], expected.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], expected.lse, rtol=1e-14, atol=1e-14)
    assert expected.lse.isneginf().any()


@few_rows()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("continues", [False, True])
def test_one_launch_has_the_bits_of_merges_one_by_one(dtype, count, continues):
    hops = [hop(name, i, dtype) for i, name in enumerate(MANY[:count])]
    hops[-1][2][0, 0, 0] = torch.nan
    before = one_by_one([hop("other index", 9), hop("range", 8)], nothing()) if continues else ()
    expected = one_by_one(hops, tuple(x.clone() for x in before) or nothing())
    out = torch.full((2, ROWS, 7, 16), torch.nan, device=DEVICE)[:, :, 2:5]  # of some heads
    lse = torch.full((2, ROWS, 7), torch.nan, dtype=torch.float64, device=DEVICE)[:, :, 2:5]
    assert_same_bits(at_once(hops, out, lse, *before), expected)
    rounded = torch.empty(2, ROWS, 3, 16, dtype=dtype, device=DEVICE)
    assert_same_bits(at_once(hops, rounded, lse.float(), *before), expected)
    if continues:  # in place
        assert_same_bits(at_once(hops, *before, *before), expected)


def test_rows_that_no_hop_has_are_empty():
    out, lse = at_once([hop("range", 1)], *(torch.full_like(x, 3.0) for x in nothing()))
    missing = [x for x in range(ROWS) if not 4 <= x < 9]
    assert not out[:, missing].any() and lse[:, missing].isneginf().all()
    assert out[:, 4:9].any() and lse[:, 4:9].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_join_the_denominator_before_the_one_rounding(dtype):
    hops = [hop("all", 1), hop("index", 2), hop("last", 3)]
    sinks = torch.tensor([0.5, -torch.inf, 30.0], device=DEVICE)
    sums, lse = one_by_one(hops, nothing())
    difference = lse.float().nan_to_num(neginf=-1e30) - sinks  # of the lse that is returned
    fraction = torch.sigmoid(difference.double())[..., None]
    expected = torch.where(lse[..., None].isneginf(), 0.0, sums * fraction)
    out = torch.empty(sums.shape, dtype=dtype, device=DEVICE)
    found, found_lse = at_once(hops, out, lse.float(), None, None, sinks)
    error = (found.double() - expected).abs() / expected.abs().clamp_min(1e-30)
    # Half a unit in the last place, or a whole one where the interpreter cuts digits; and the
    # rounding of sums and of the fraction in fp32.
    unit = torch.finfo(dtype).eps * (1 if DEVICE.type == "cpu" else 0.5)
    assert error.max() <= unit + 8 * torch.finfo(torch.float32).eps
    assert_same_bits([found_lse], [lse])


def test_nan_reaches_only_its_own_row():
    first, second = hop("all", 1), hop("range", 2)
    first[2][0, 2, 0] = second[2][1, 3, 2] = torch.nan
    out, lse = at_once([first, second], *nothing())
    assert out.isnan().any(-1).nonzero().tolist() == lse.isnan().nonzero().tolist()
    assert lse.isnan().nonzero().tolist() == [[0, 2, 0], [1, 7, 2]]


@pytest.fixture
def merged_by_kernels(monkeypatch):
    """Partials of CPU tensors merge as those on CUDA do. Returns the hops of each launch."""
    monkeypatch.setattr(waiting_results, "is_on_cuda", lambda x: True)
    launches, launch, one_at_a_time = [], launching._run, threading.Lock()

    def record(prepared, tensors):
        launches.append(prepared.arguments[2])
        with one_at_a_time:  # the interpreter of threads that stand for ranks
            launch(prepared, tensors)

    monkeypatch.setattr(launching, "_run", record)
    return launches


def partial_of(hops, **options):
    q = hops[0][1].new_empty(2, ROWS, 3, 8)
    total = Partial.nothing(q, hops[0][1], **options)
    for rows, out, lse in hops:
        total.make_room(rows.count, out.dtype)
        total.merge(rows, out, lse, is_owned=True)
    return total


def test_a_partial_merges_all_hops_in_one_launch(merged_by_kernels):
    hops = [hop(name, i) for i, name in enumerate(RANGES)]
    expected = one_by_one(hops, nothing())
    merged_by_kernels.clear()
    found = partial_of(hops).finish(None, torch.bfloat16)
    assert_same_bits(found, expected)
    assert found[0].dtype == torch.bfloat16 and merged_by_kernels == [5]
    whole, heads = torch.empty(2, ROWS, 5, 16).to(found[0]), slice(1, 4)
    into = whole[:, :, heads], found[1].new_empty(2, ROWS, 5)[:, :, heads]
    assert partial_of(hops).finish(None, torch.bfloat16, into) is into
    assert_same_bits(into, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_hops_or_bytes_than_may_wait_are_merged_before(merged_by_kernels, dtype):
    """At most eight results wait, and with the sums they take 12 bytes per element of out."""
    # The numbers of hops of the launches: of 20 results of 5 of the 11 rows, and of all rows
    launches = {
        torch.bfloat16: ([8, 8, 4], [6, 4, 4, 4, 2]),
        torch.float32: ([6, 4, 4, 4, 2], [3, *[2] * 8, 1]),
    }
    for name, expected_launches in zip(("range", "all"), launches[dtype], strict=True):
        hops = [hop(name, i, dtype) for i in range(20)]
        hops = [(rows, out.contiguous(), lse) for rows, out, lse in hops]  # without other columns
        expected = one_by_one(hops, nothing())
        merged_by_kernels.clear()
        assert_same_bits(partial_of(hops).finish(None, torch.float32), expected)
        assert merged_by_kernels == expected_launches


def test_sums_continue_in_the_tensor_of_the_result(merged_by_kernels):
    """More results than may wait, of a partial whose out is written where its sums are."""
    hops = [hop("range", i) for i in range(9)]
    expected = one_by_one(hops, nothing())
    into = torch.empty_like(expected[0]), torch.empty(2, ROWS, 3)
    assert partial_of(hops, out=into[0]).finish(None, torch.bfloat16, into) is into
    assert_same_bits(into, expected)


def test_columns_that_a_kernel_adds_count(merged_by_kernels):
    """Results of three times as many columns take 6 bytes per element of out: two may wait."""
    total = Partial.nothing(torch.empty(2, ROWS, 3, 8, dtype=torch.bfloat16), hop("all", 0)[1])
    value_dim = hop("all", 0)[1].shape[-1]
    for i in range(4):
        rows, out, lse = hop("all", i)
        total.make_room(ROWS, torch.bfloat16, columns=3 * value_dim)
        wide = out.new_zeros(*out.shape[:-1], 3 * value_dim)
        wide[..., :value_dim] = out
        total.merge(rows, wide[..., :value_dim], lse, is_owned=True)
    total.finish(None, torch.bfloat16)
    assert merged_by_kernels == [2, 1, 1]


def test_results_of_other_dtypes_wait_apart(merged_by_kernels):
    dtypes = [torch.bfloat16, torch.float16, torch.float16]
    hops = [hop("all", i, dtype) for i, dtype in enumerate(dtypes)]
    hops[2] = *hops[2][:2], hops[2][2].double()
    expected = [one_by_one([x], nothing()) for x in hops]
    total = nothing()
    for x in expected:
        one_by_one([(hops[0][0], *x)], total)
    merged_by_kernels.clear()
    assert_same_bits(partial_of(hops).finish(None, torch.float32), total)
    assert merged_by_kernels == [1, 1, 1]


@few_rows()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, 0, -1])
@pytest.mark.parametrize("names", [["all"], ["range", "index"], MANY], ids=len)
@pytest.mark.parametrize("is_read", [False, True])
def test_sums_of_dq_have_the_bits_of_adding_one_by_one(
    merged_by_kernels, dtype, sign, names, is_read
):
    """Rounded once, also where the sums are read between two results."""
    hops = [hop(name, i, dtype)[:2] for i, name in enumerate(names)]
    expected = torch.zeros(2, ROWS, 3, 16, device=DEVICE)
    sums, into = QuerySums(expected, torch.float32), expected.new_empty(2, ROWS, 5, 16)[:, :, 1:4]
    for i, (rows, part) in enumerate(hops):
        expected[:, rows.local(DEVICE)] += sign * part.float()
        sums.make_room(rows.count, dtype)
        sums.add(rows, part.clone(), sign)
        if is_read and i == 1:
            assert_same_bits([sums.sums], [expected])
    assert len(merged_by_kernels) <= len(hops) // 2
    assert sums.finish(into) is into
    assert_same_bits([into], [expected])


def test_dq_is_rounded_to_the_dtype_of_q(merged_by_kernels):
    hops = [hop("all", i)[:2] for i in range(6)]
    expected = torch.zeros(2, ROWS, 3, 16, device=DEVICE)
    sums = QuerySums(expected.bfloat16(), torch.float32)
    for rows, part in hops:
        expected[:, rows.local(DEVICE)] += part.float()
        sums.make_room(rows.count, part.dtype)
        sums.add(rows, part)
    found = sums.finish()
    assert found.dtype == torch.bfloat16
    assert_same_bits([found], [expected])
    assert merged_by_kernels == [4, 2]  # the results take 8 bytes per element of dq at most
    whole, only = hop("all", 1)[1].contiguous(), QuerySums(expected, torch.float32)
    only.add(slice(0, ROWS), whole)
    assert only.finish() is whole


def test_results_do_not_wait_once_sums_were_read(merged_by_kernels):
    hops = [hop(name, i) for i, name in enumerate(RANGES)]
    expected = one_by_one(hops, nothing())
    merged_by_kernels.clear()
    total = partial_of(hops[:2])
    sums = total.sums
    for rows, out, lse in hops[2:]:
        total.merge(rows, out, lse)
    assert len(merged_by_kernels) == 4
    assert_same_bits(sums, expected)


GROUPS = [slice(0, 1), slice(1, 3)]  # of heads


@few_rows(pairs=False)
@pytest.mark.parametrize("first", [0, 2])  # results of all heads before those of groups
@pytest.mark.parametrize("is_read", [False, True])  # after the results of the first group
@pytest.mark.parametrize("last", [0, 1])  # results of all heads after those of groups
def test_results_of_groups_of_heads_wait_too(merged_by_kernels, first, is_read, last):
    hops = [hop(name, i) for i, name in enumerate(MANY)]
    stop = len(hops) - last
    expected = one_by_one(hops, nothing())
    merged_by_kernels.clear()
    q = torch.empty(2, ROWS, 3, 16, dtype=torch.bfloat16, device=DEVICE)
    total = Partial.nothing(q, q)
    for rows, out, lse in hops[:first]:
        total.merge(rows, out, lse)
    total.divide(GROUPS)
    for heads in GROUPS:
        for rows, out, lse in hops[first:stop]:
            total.merge(rows, out[:, :, heads], lse[:, :, heads], heads=heads)
        if is_read:
            total.add_up()
    for rows, out, lse in hops[stop:]:
        total.merge(rows, out, lse)
    sinks = torch.tensor([0.5, -torch.inf, 3.0], device=DEVICE)
    whole = Partial.of(*(x.clone() for x in expected)).finish(sinks, torch.float32)
    found = total.finish(sinks, torch.float32)
    torch.testing.assert_close(found[0], whole[0], rtol=1e-6, atol=1e-6)
    assert_same_bits(found[1:], [expected[1].float()])
    assert len(merged_by_kernels) < len(hops)


@pytest.mark.parametrize("is_read", [False, True])
def test_dq_of_groups_of_heads_waits_too(merged_by_kernels, is_read):
    hops = [hop(name, i) for i, name in enumerate(MANY)]
    expected = torch.zeros(2, ROWS, 3, 16, device=DEVICE)
    sums = QuerySums(expected, torch.float32)
    sums.divide(GROUPS)
    for rows, part, _ in hops:
        expected[:, rows.local(DEVICE)] += part.float()
    for heads in GROUPS:
        for rows, part, _ in hops:
            sums.add(rows, part[:, :, heads], heads=heads, is_owned=False)
        if is_read:
            sums.add_up()
    assert_same_bits([sums.sums], [expected])
    assert len(merged_by_kernels) < len(hops)


def test_groups_without_results_are_empty(merged_by_kernels):
    rows, out, lse = hop("all", 1)
    total = Partial.nothing(out, out)
    total.divide(GROUPS)
    total.merge(rows, out[:, :, 1:], lse[:, :, 1:], heads=GROUPS[1])
    found, of_found = total.finish(None, torch.float32)
    assert not found[:, :, :1].any() and of_found[:, :, :1].isneginf().all()
    assert_same_bits([found[:, :, 1:]], [out[:, :, 1:].float()])


def dq_on_this_rank(comm, case):
    outputs, leaves = begin(comm, case)
    backward(outputs)
    return leaves["q"].grad


@pytest.fixture
def one_kernel(monkeypatch):
    """All blocks of the backend flash_attn are computed by a stand-in of FlashAttention-4."""
    functions = {"_flash_attn_fwd": varlen_kernels.fa4_forward}
    functions |= {"_flash_attn_bwd": varlen_kernels.fa4_backward}
    kernel = flash_attn.PACKAGES["FlashAttention-4"].kernel(
        SimpleNamespace(__name__="package", **functions), 9
    )
    monkeypatch.setattr(flash_attn, "kernel_for", lambda *_: kernel)
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks' tensors are on the CPU")
@pytest.mark.parametrize("rows", [4096, 10])  # of a group of heads: one group, or two
def test_results_of_other_ranks_wait_for_one_merge(
    merged_by_kernels, one_kernel, monkeypatch, rows
):
    """They have the bits of merges one after another, in fewer launches. Results are in fp16: the
    interpreter does not round fp32 to bf16, but cuts it."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", rows)
    case = Case(
        "token_ring", Layout.zigzag([0, 60, 61, 130], 4), causal=True, dtype=torch.float16,
        heads=4, kv_heads=2, backend="flash_attn", sinks=True,
        module_options=(("deterministic", False),),
    )  # fmt: skip
    found, launches = virtual(4, run, case)[0], len(merged_by_kernels)
    monkeypatch.setattr(tile_strategy, "_kept_bytes", lambda total: 0)
    merged_by_kernels.clear()
    expected = virtual(4, run, case)[0]
    assert all(map(np.array_equal, found, expected))
    assert launches < len(merged_by_kernels) - 8


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks' tensors are on the CPU")
def test_dq_is_not_rounded_to_the_dtype_of_messages(merged_by_kernels, one_kernel):
    """Contributions that travel are in bf16. Their sum is rounded to the dtype of q, fp16."""
    case = Case(
        "token_ring", Layout.zigzag([0, 60, 61, 130], 4), causal=True, dtype=torch.float16, heads=4,
        kv_heads=2, backend="flash_attn",
        module_options=(("deterministic", False), ("gradient_dtype", torch.bfloat16)),
    )  # fmt: skip
    for rows in virtual(4, dq_on_this_rank, case):
        assert not torch.equal(rows, rows.bfloat16().to(rows.dtype))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks' tensors are on the CPU")
@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "disaggregated"])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "heads": 4, "batch": 2}])
def test_strategies_merge_the_hops_of_a_kernel(merged_by_kernels, one_kernel, strategy, options):
    """There is one merge per rank and pass, except where partial results travel."""
    layout = Layout.zigzag([0, 40, 41, 90], 3)
    options = {"causal": True, "dtype": torch.bfloat16, "backend": "flash_attn"} | options
    case = Case(strategy, layout, module_options=(("deterministic", False),), **options)
    results = virtual(3, run, case)[0]
    assert_right(results, oracle(case), case.dtype, roundings=8)
    assert merged_by_kernels and (strategy == "token_ring" or len(merged_by_kernels) <= 6)


def test_the_only_result_of_all_rows_is_returned_as_it_is(merged_by_kernels):
    rows, out, lse = hop("all", 1)
    out = out.contiguous()
    assert partial_of([(rows, out, lse)]).finish(None, torch.bfloat16)[0] is out
    assert not merged_by_kernels
    total = partial_of([hop("range", 1)])
    foreign = Partial.nothing(out, out)
    foreign.merge(rows, out, lse)  # which others may change
    assert foreign.finish(None, torch.bfloat16)[0] is not out
    assert total.finish(None, torch.bfloat16)[0].shape == out.shape


@pytest.mark.parametrize("has_lse", [True, False])
def test_a_prepared_call_keeps_no_memory(monkeypatch, has_lse):
    """Memory that a CUDA graph's capture allocates belongs to the graph, and not to later calls."""
    monkeypatch.setattr(merge_hops, "_calls", {})
    out, lse = drawn(ROWS, 20)
    hop = kernels.HopResult(out.clone(), lse.contiguous() if has_lse else None, 0)
    kernels.merge_hops([hop], out, lse.contiguous() if has_lse else None)
    (call,) = merge_hops._calls.values()
    assert not call.place.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_adds_to_the_rows_of_an_index(dtype, sign):
    part, total = drawn(5, 20, dtype, batch=2)[0], drawn(11, 20, batch=2)[0]
    expected = total.index_add(1, INDEX, part.float(), alpha=sign)
    kernels.add_to_rows(part, total, INDEX, sign)
    assert torch.equal(total, expected)


def test_rows_of_messages_are_added_by_a_kernel_on_a_gpu(monkeypatch):
    """Several ranges, in bf16: nothing casts the message in pieces."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "index_add_", None)
    rows, total = Rows(np.array([[7, 10], [0, 2]])), drawn(11, 20, batch=2)[0].transpose(0, 1)
    block = drawn(5, 20, torch.bfloat16, batch=2)[0].transpose(0, 1).contiguous()
    expected = total.index_add(0, rows.local(DEVICE), block.float())
    rows.add(block, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta_on_a_gpu_is_computed_by_a_kernel(monkeypatch, has_dlse):
    """The kernel reads bf16, and nothing copies out or dout in fp32."""
    (out, lse), (dout, dlse) = (drawn(rows, 20, torch.bfloat16, batch=2) for rows in (11, 11))
    dout, dlse = dout + 1, lse.nan_to_num(neginf=1.0) if has_dlse else None
    calls, delta = [], kernels.delta

    def recorded(*tensors):
        calls.append(tensors)
        return delta(*tensors)

    monkeypatch.setattr(kernels, "delta", recorded)
    found = []
    for is_cuda in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
        found.append(OutputGradient(dout, out, lse, dlse).ensure_delta())
    assert len(calls) == 1
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_they_compile_without_a_gpu():
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    found = [line.split() for line in ran.stdout.splitlines()]
    assert len(found) == 4 * len(TARGETS), ran.stderr
    assert all(spilled == "0" for _, name, _, spilled in found if name == "flash_merge_hops"), found
