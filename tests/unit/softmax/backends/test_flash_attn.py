"""The backend "flash_attn", with stand-ins of the packages' signatures that compute on CPUs."""

import ast
import importlib
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import weakref
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from seqpar.kernels.gpus import Gpu, assume
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpar import Layout, make_attention, use_backend
from seqpar.attention.rehearsal import SilentComm
from seqpar.core.installed import installed_version
from seqpar.core.torch_private import has_fake_mode
from seqpar.softmax import attend
from seqpar.softmax.backends import flash_attn, triton, varlen
from seqpar.softmax.backends.compile_ahead import compile_ahead
from seqpar.softmax.backends.flash_attn import PACKAGES, load_package
from seqpar.softmax.backends.varlen import (
    BackwardRows,
    HeadDims,
    VarlenBlock,
    VarlenCall,
    VarlenSegment,
)
from seqpar.softmax.compute.partial import OutputGradient, Sums, Zeros
from seqpar.softmax.keys import key_strategy
from seqpar.softmax.queries import tile_strategy
from seqpar.softmax.result_dtypes import ResultDtypes
from tests.support import varlen_kernels
from tests.support.calls import sent_bytes
from tests.support.cases import Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

MODULES = {
    "FlashAttention-2": {
        "_flash_attn_varlen_forward": varlen_kernels.fa2_forward,
        "_flash_attn_varlen_backward": varlen_kernels.fa2_backward,
    },
    "FlashAttention-3": {
        "_flash_attn_forward": varlen_kernels.fa3_forward,
        "_flash_attn_backward": varlen_kernels.fa3_backward,
    },
    "FlashAttention-4": {
        "_flash_attn_fwd": varlen_kernels.fa4_forward,
        "_flash_attn_bwd": varlen_kernels.fa4_backward,
        "utils.create_softcap_scoremod": varlen_kernels.create_softcap_scoremod,
        "utils.create_softcap_scoremod_bwd": varlen_kernels.create_softcap_scoremod_bwd,
    },
}
SOURCES = {  # what pip downloads, and the file in it
    "FlashAttention-2": (
        ["flash-attn==2.8.3", "--no-binary", ":all:", "--no-build-isolation"],
        "flash_attn/flash_attn_interface.py",
    ),
    "FlashAttention-4": (["flash-attn-4==4.0.0b36"], "flash_attn/cute/interface.py"),
    "the newest FlashAttention-4": (["flash-attn-4", "--pre"], "flash_attn/cute/interface.py"),
}

# Parameters, and how many tensors result: hopper/flash_attn_interface.py of FlashAttention-3,
# commit 01afd16d248c4c7d0f9aed1914084f16c490eaed.
FLASH_ATTENTION_3 = {
    "_flash_attn_forward": (
        "q k v k_new=None v_new=None qv=None out_=None "
        "cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None seqused_q=None seqused_k=None "
        "max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None leftpad_k=None "
        "rotary_cos=None rotary_sin=None seqlens_rotary=None "
        "q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False "
        "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0",
        4,
    ),
    "_flash_attn_backward": (
        "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None "
        "sequed_q=None sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 "
        "softcap=0.0 deterministic=False sm_margin=0",
        1,
    ),
}


def install(monkeypatch, name, functions, module_name=None):
    """Make a module with these functions importable, and its parents too."""
    path = module_name or PACKAGES[name].modules[0]
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, function in functions.items():
        *modules, last = name.split(".")
        holder = vars(module)
        for inner in modules:
            holder = vars(holder.setdefault(inner, types.SimpleNamespace()))
        holder[last] = function


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A CPU passes for an sm_90, and stand-ins for the version that is pinned. No package is there
    unless a test installs a stand-in."""
    for path in (path for package in PACKAGES.values() for path in package.modules):
        monkeypatch.setitem(sys.modules, path, None)
    monkeypatch.setattr(flash_attn, "gpu_major", lambda device: 9)
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: "4.0.0b36")
    load_package.cache_clear()
    yield
    load_package.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    install(monkeypatch, "FlashAttention-4", MODULES["FlashAttention-4"])
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": (9, 0)},
        {"softcap": 2.0, "dlse": True},
        {"alibi": "heads"},
        {"dlse": True, "sinks": True},
        {"scale": -0.5},
        {"scale": 0.0},
    ],
)
def test_equals_the_oracle(monkeypatch, name, strategy, options):
    install(monkeypatch, name, MODULES[name])
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    layout = Layout.zigzag([0, 40, 41, 90], 3)
    options = {"causal": True, "dtype": torch.bfloat16, "backend": "flash_attn"} | options
    not_deterministic = (("deterministic", False),)
    case = Case(strategy, layout, module_options=not_deterministic, **options)
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype, roundings=4)


GPU = torch.device("cuda", 0)
DOCUMENTS = [0, 40, 41, 90]
RANGES = (0, 0, 40, 0, 9, None, None), (2, 5, 49, 0, 40, None, 0)
BF16 = torch.bfloat16


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "token_ring", "mesh"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dlse": True, "sinks": True, "batch": 2},
        {"window": (50, 0)},
        {"value_dim": 16, "dlse": True},
        {"dim": 24, "scale": -0.5},
        {"ranges": RANGES, "dlse": True, "sinks": True},
        {"kv_layout": [0, 20, 70, 70], "causal": False, "dlse": True, "sinks": True},
    ],
)
def test_only_results_equal_the_oracle(installed, strategy, ranks, options):
    """Where a kernel's first result remains the only one. Also rows and documents without keys."""
    options = {"causal": True, "heads": 4, "kv_heads": 2} | options
    if "kv_layout" in options:
        options["kv_layout"] = Layout.zigzag(options["kv_layout"], ranks)
    case = Case(
        strategy, Layout.zigzag(DOCUMENTS, ranks), dtype=BF16, backend="flash_attn",
        module_options=(("deterministic", False),), **options,
    )  # fmt: skip
    assert_right(virtual(ranks, run, case)[0], oracle(case), BF16, roundings=4)


@few_rows()
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("token_ring", ()),
        ("mesh", ()),
        ("disaggregated+at random", ()),
        ("ulysses", (("keep", "tokens"),)),
    ],
)
@pytest.mark.parametrize("dlse", [False, True])
def test_received_rows_need_no_out(monkeypatch, installed, strategy, options, dlse):
    """Kernels that take dlse get zeros as out and −delta as dlse. Nothing rebuilds out, and calls
    share their zeros."""
    outs = []

    def refuse(output):
        assert output.out is not None, "out was rebuilt"
        return output.out

    def recorded(q, k, v, out, *args, **named):
        if not out.count_nonzero():
            outs.append(out)
            assert named["dlse"] is not None
        return MODULES["FlashAttention-4"]["_flash_attn_bwd"](q, k, v, out, *args, **named)

    recorded.__signature__ = inspect.signature(varlen_kernels.fa4_backward)
    install(monkeypatch, "FlashAttention-4", MODULES["FlashAttention-4"] | {
        "_flash_attn_bwd": recorded,
    })  # fmt: skip
    monkeypatch.setattr(OutputGradient, "ensure_out", refuse)
    case = Case(
        strategy, Layout.zigzag(DOCUMENTS, 3), causal=True, heads=4, kv_heads=2, dtype=BF16,
        backend="flash_attn", dlse=1.0 if dlse else 0.0, sinks=dlse, module_options=options,
    )  # fmt: skip
    assert_right(virtual(3, run, case)[0], oracle(case), BF16, roundings=4)
    assert outs


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh"])
@pytest.mark.parametrize("gradient_dtype", [None, BF16])
def test_messages_of_only_results_have_the_bits_of_sums(
    monkeypatch, installed, strategy, gradient_dtype
):
    """bf16 → fp32 → bf16 is exact, so a kernel's only result is sent without sums in fp32."""
    case = Case(
        strategy, Layout.zigzag(DOCUMENTS, 3), causal=True, heads=4, kv_heads=2, dtype=BF16,
        value_dim=16, batch=2, backend="flash_attn",
        module_options=(("gradient_dtype", gradient_dtype),),
    )  # fmt: skip
    found = virtual(3, run, case)[0]
    monkeypatch.setattr(Sums, "keep", lambda sums, *results: False)
    for x, y in zip(found[2:], virtual(3, run, case)[0][2:], strict=True):
        assert (x == y).all()


LAYOUTS = {
    "zigzag": Layout.zigzag([0, 60, 61, 130], 4),
    "contiguous": Layout.contiguous([0, 60, 61, 130], 4),
    "striped": Layout.striped([0, 60, 61, 130], 4, 7),
    "spans": Layout.from_spans(
        [[(0, 0, 20)], [(0, 20, 60), (2, 0, 9), (2, 40, 69)], [], [(1, 0, 1), (2, 9, 40)]],
        [0, 60, 61, 130],
    ),
}


def bits_and_bytes(comm, case):
    """Return the results of a call, the bytes that its passes send, and those of `traffic`."""
    found = run(comm, case)
    attn = module(case.strategy, comm, **dict(case.module_options))
    q, k, v = (case.layout.shard(x, attn.rank, 1) for x in case.inputs()[:3])
    with use_backend(case.backend):
        rows = attn.traffic(q, k, v, case.layout, **case.options())
        sent = sent_bytes(comm, case, **dict(case.module_options))
    passes = "forward", "backward"
    return found, sent, [sum(x.bytes for x in rows if x.direction == y) for y in passes]


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", "mesh", "usp"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("zigzag", {}),
        ("contiguous", {"dtype": torch.float16, "value_dim": 16}),
        ("zigzag", {"causal": False, "scale": -0.5}),
        ("zigzag", {"window": (9, 0)}),
        ("striped", {"causal": False}),
        ("striped", {}),
        ("spans", {}),
        ("zigzag", {"alibi": "heads"}),
    ],
)
def test_results_of_one_call_travel_as_the_kernel_returned_them(
    monkeypatch, installed, strategy, layout, options
):
    """The bits are those of results that travel in fp32. Both ranks of a message know its dtype."""
    options = {"causal": True, "dtype": BF16, "batch": 1} | options
    case = Case(
        strategy, LAYOUTS[layout], heads=4, kv_heads=2, backend="flash_attn", **options,
    )  # fmt: skip
    found = virtual(4, bits_and_bytes, case)
    exact = ResultDtypes(torch.float32, torch.float32)
    for file in (key_strategy, tile_strategy):
        monkeypatch.setattr(file, "result_dtypes", lambda *_: exact)
    in_fp32 = virtual(4, bits_and_bytes, case)
    for (bits, sent, traffic), (expected, most, of_most) in zip(found, in_fp32, strict=True):
        assert all(map(np.array_equal, bits, expected))
        assert sent == traffic and most == of_most
    sent, most = (np.sum([x[1] for x in each], 0) for each in (found, in_fp32))
    assert (sent <= most).all()
    if layout == "zigzag" and options.keys() <= {"causal", "dtype", "batch", "scale"}:
        forward, backward = sent < most
        assert forward == (strategy == "token_ring")
        assert backward == (strategy != "mesh")


def test_results_of_several_calls_travel_in_fp32(installed):
    """A window cuts some blocks into several segments that one call cannot compute."""
    case = Case(
        "ring", LAYOUTS["zigzag"], causal=True, window=(20, 0), heads=4, kv_heads=2, dtype=BF16,
        backend="flash_attn",
    )  # fmt: skip

    def returned(comm, case):
        with mock.patch.object(comm, "exchange", wraps=comm.exchange) as exchange:
            run(comm, case)
        sends = [x.args[0] for x in exchange.call_args_list if x.kwargs["label"] == "ring backward"]
        return {x.dtype for messages in sends for _, x in messages if x.numel()}

    assert set.union(*virtual(4, returned, case)) == {BF16, torch.float32}


def test_zeros_of_a_pass_are_one_allocation():
    zeros = Zeros()
    large, small = torch.ones(4, 2, 8), torch.ones(3, 2, 8)
    first, second = zeros.like(large), zeros.like(small)
    assert first.shape == large.shape and second.shape == small.shape
    assert not first.count_nonzero() and not second.count_nonzero()
    assert first.data_ptr() == second.data_ptr()
    assert zeros.like(torch.ones(5, 2, 8)).shape == (5, 2, 8)
    output = OutputGradient(large, large, large[..., 0], None, zeros=zeros)
    assert output.received(small, small[..., 0], small[..., 0], None).zeros is zeros


@pytest.mark.parametrize("options", [{}, {"batch": 2, "dlse": True, "sinks": True}])
def test_keys_of_several_ranks_are_one_call(monkeypatch, installed, options):
    """Rank 2 of 5 gets keys of ranks 0 and 4 in one exchange. Its later rows attend to both."""
    calls = []

    def recorded(block, q, k, v, slices, *others):
        calls.append(len(varlen.varlen_work(slices, repeats_keys=True).calls))
        forward(block, q, k, v, slices, *others)

    forward = VarlenBlock.forward
    monkeypatch.setattr(VarlenBlock, "forward", recorded)
    layout = Layout.zigzag([0, 60, 61, 130], 5)
    case = Case("all_gather", layout, True, heads=4, kv_heads=2, dtype=BF16,
                backend="flash_attn", **options)  # fmt: skip
    assert_right(virtual(5, run, case)[0], oracle(case), BF16, roundings=4)
    assert set(calls) == {1}


def test_a_repeated_call_finds_what_the_first_one_prepared(monkeypatch, installed):
    """The backends, the kernels, their calls, and what does not change with the tensors."""
    case = Case("ring", Layout.zigzag(DOCUMENTS, 2), True, dtype=BF16, backend="flash_attn")
    first = virtual(2, run, case)[0]
    for name in ("prepared", "_arguments"):
        monkeypatch.setattr(flash_attn, name, None)
    monkeypatch.setattr(varlen, "positive_options", None)
    monkeypatch.setattr(attend, "_choose", None)
    for x, y in zip(first, virtual(2, run, case)[0], strict=True):
        assert (x == y).all()


def test_kernels_of_few_scales_are_kept(monkeypatch, installed):
    """A scale may differ in every call on the same layout."""
    alive, make = weakref.WeakSet(), VarlenBlock.__init__

    def made(block, *arguments):
        make(block, *arguments)
        alive.add(block)

    monkeypatch.setattr(VarlenBlock, "__init__", made)
    for file in ("attend", "call"):
        monkeypatch.setattr(f"seqpar.softmax.{file}.MAX_KEPT_SETTINGS", 2)
    layout, counts = Layout.zigzag([0, 42, 43, 94], 2), []
    for scale in range(1, 7):
        options = {"dtype": BF16, "backend": "flash_attn", "scale": float(scale)}
        virtual(2, run, Case("ring", layout, True, **options))
        counts.append(len(alive))
    assert counts[0] > 0 and len(set(counts[1:])) == 1


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "token_ring"])
def test_preparing_a_layout_compiles_what_its_calls_run(monkeypatch, strategy):
    """Once for each variant, without data, and only in processes that use a GPU."""
    found = []

    def forward(q, k, v, causal, cu_seqlens_q, **named):
        assert has_fake_mode() and q.device == k.device == cu_seqlens_q.device == GPU
        found.append(("forward", causal))
        return q.new_empty(q.shape), q.new_empty(q.shape[1::-1], dtype=torch.float32)

    def backward(q, k, v, out, dout, lse, causal, dlse, **named):
        assert has_fake_mode() and lse.device == GPU and not (causal and dlse is not None)
        found.append(("backward", causal, dlse is not None))
        return q, k, v

    for name, function in {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}.items():
        function.__signature__ = inspect.signature(MODULES["FlashAttention-4"][name])
    functions = {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward, "is_fake_mode": None}
    install(monkeypatch, "FlashAttention-4", MODULES["FlashAttention-4"] | functions)
    assume(GPU, Gpu("NVIDIA H200", 9, 132))
    with use_backend("flash_attn"):
        attn = make_attention(strategy, SilentComm(1, 3, False))
        of_calls = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": BF16, "device": GPU}
        prepare = attn.preparation(**of_calls, causal=True)
    prepare(Layout.zigzag([0, 48, 102], 3))
    assert not found  # this process has not used a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for documents in [0, 40, 41, 90], [0, 32, 90]:
        prepare(Layout.zigzag(documents, 3))
    is_received = strategy == "token_ring"  # then queries of other ranks have no out
    expected = [("forward", True), ("forward", False), ("backward", True, False)]
    assert len(found) == len(set(found))
    assert {*expected, ("backward", False, is_received)} <= set(found)


def test_a_failure_to_compile_before_the_call_is_a_warning(monkeypatch):
    """The call itself may still succeed."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    kind, q = object(), torch.empty(0, device="meta")
    with pytest.warns(UserWarning, match=r"before failed with OSError: undefined symbol"):
        compile_ahead(kind, q, broken)
    compile_ahead(kind, q, broken)  # warns once


def test_groups_that_share_keys_are_summed_exactly(monkeypatch, installed):
    """1 + 2⁻⁸ + 2⁻⁸ in bf16, rounded once, is 1 + 2⁻⁷; rounded twice, 1."""
    sizes = iter([1.0, 2**-8, 2**-8])

    def backward(block, *arguments):
        q, k, v, _, gradients, _ = arguments[1:]
        size = next(sizes)
        gradients.queries.add(slice(0, q.shape[1]), torch.zeros_like(q))
        gradients.keys.keep(torch.full_like(k, size), torch.full_like(v, size))

    monkeypatch.setattr(VarlenBlock, "backward", backward)
    options = (("deterministic", False), ("head_groups", 3))
    case = Case(
        "ulysses", Layout.contiguous(DOCUMENTS, 1), True, heads=3, dtype=BF16,
        backend="flash_attn", module_options=options,
    )  # fmt: skip
    *_, dk, dv = virtual(1, run, case)[0]
    assert (dk == 1 + 2**-7).all() and (dv == 1 + 2**-7).all()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dim", [128, 192, 248, 256])
def test_head_dims_and_the_gradient_of_lse(monkeypatch, name, dim):
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: "4.0.0b36")
    kernel = PACKAGES[name].kernel(types.ModuleType(PACKAGES[name].modules[0]), 9)
    options = flash_attn.CallOptions(1.0, 2.0, "flash_attn", True)
    operands = HeadDims(BF16, dim, dim)
    assert kernel.takes(operands, options, has_dlse=False)
    takes = kernel.takes(operands, options, has_dlse=True)
    assert takes == (name == "FlashAttention-4" or dim < 256)


DENSE = {
    "one document": (Layout.contiguous(768, 2), [384]),
    "equal documents": (Layout.contiguous([0, 384, 768], 1), [384, 384]),
    "documents of other lengths": (Layout.contiguous([0, 384, 896], 1), None),
    "documents of one tile": (Layout.contiguous([0, 256, 512], 1), None),
}


@pytest.mark.parametrize("options", [{}, {"batch": 2, "softcap": 2.0}])
@pytest.mark.parametrize("documents", DENSE)
def test_equal_segments_are_a_batch_for_flash_attention_4(monkeypatch, documents, options):
    """Their rows, lse and its gradient are in the order of other calls."""
    layout, lengths = DENSE[documents]
    names = "_flash_attn_fwd", "_flash_attn_bwd"
    functions, shapes = MODULES["FlashAttention-4"], {name: set() for name in names}

    def recorded(name):
        def call(q, *args, cu_seqlens_q, **named):
            shapes[name].add(q.shape[:-2])
            assert (q.dim() == 4) == (cu_seqlens_q is None)
            return functions[name](q, *args, cu_seqlens_q=cu_seqlens_q, **named)

        call.__signature__ = inspect.signature(functions[name])
        return call

    install(monkeypatch, "FlashAttention-4", functions | {x: recorded(x) for x in names})
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    case = Case("ring", layout, True, dlse=True, dtype=BF16, backend="flash_attn", **options)
    assert_right(virtual(layout.ranks, run, case)[0], oracle(case), BF16, roundings=4)
    batch = options.get("batch", 1)
    rows = (batch * layout.tokens,) if lengths is None else (batch * len(lengths), lengths[0])
    assert shapes["_flash_attn_fwd"] == {rows}
    assert rows in shapes["_flash_attn_bwd"]  # beside the halves of a rank's own keys


@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0)])
def test_flash_attention_4_compiles_once_for_a_mask(monkeypatch, window, gpu):
    """What of its keys depends on lengths, in forward and backward: whether all rows of a segment,
    and of all query heads of a KV head, are in one tile."""
    rows = {"sm_90": (128, 192), "sm_100": (256,)}[gpu]  # of a forward's tile, by head dim
    found = {"forward": set(), "backward": set()}

    def key(cu_seqlens_q, max_seqlen_q, max_seqlen_k, **named):
        return (
            cu_seqlens_q is None,
            *(-(-max_seqlen_q // x) == 1 for x in (*rows, 64, 80, 128)),
            *(-(-max_seqlen_k // x) == 1 for x in (48, 64, 96, 128)),
        )

    def forward(q, k, v, return_lse, **named):
        found["forward"].add(key(**named))
        return q.new_empty(q.shape), q.new_empty(q.shape[1::-1])

    def backward(q, k, v, out, dout, lse, dlse, deterministic, **named):
        found["backward"].add(key(**named))
        return q, k, v

    functions = types.SimpleNamespace(
        __name__="flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward
    )
    kernel = PACKAGES["FlashAttention-4"].kernel(functions, 9 if gpu == "sm_90" else 10)
    for lengths in LENGTHS:
        call_once(kernel, lengths, window)
    assert all(len(keys) == 1 for keys in found.values())


LENGTHS = [1], [7, 40], [128, 1], [200], [256, 256], [257], [5, 3000], [64] * 40


def call_once(kernel, lengths, window):
    """Forward and backward of documents of these lengths, all keys of which are here."""
    edges = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    segments = [VarlenSegment(*rows, (rows,), *window) for rows in edges]
    q, k = (torch.zeros(sum(lengths), heads, 64, dtype=BF16) for heads in (4, 2))
    tables = VarlenCall(segments, window).tables(1, q.device)
    options = flash_attn.CallOptions(1.0, 0.0, "flash_attn", True)
    out, lse = kernel.forward(tables, options)(q, k, k)
    assert out.shape == q.shape and lse.shape == q.shape[1::-1]
    rows = BackwardRows(out, q, out, lse, None, k, k)
    for x, gradient in zip((q, k, k), kernel.backward(tables, options)(rows), strict=True):
        assert x.shape == gradient.shape


class Recorded(dict):
    """A cache of compiled kernels that has every key it is asked for."""

    def __contains__(self, key):
        self[key] = None
        return True


@pytest.mark.skipif(
    installed_version("flash-attn-4") is None, reason="needs the extra flash-attn, and no GPU"
)
@pytest.mark.parametrize("gpu", [90, 100])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0)])
def test_the_package_compiles_once_for_a_mask(monkeypatch, window, gpu):
    """With the package itself, which computes nothing of fake tensors. Documents of equal lengths
    have one more variant."""
    (path,) = PACKAGES["FlashAttention-4"].modules
    monkeypatch.delitem(sys.modules, path)
    package = importlib.import_module(path)
    monkeypatch.setattr(package, "_get_device_arch", lambda: gpu)
    monkeypatch.setattr(package, "get_num_sms_for_selection", lambda *arguments: 132)
    found = {}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        found[name] = Recorded()
        monkeypatch.setattr(getattr(package, name), "compile_cache", found[name])
    for name in ("_bwd_preprocess", "_bwd_postprocess_convert"):
        monkeypatch.setattr(getattr(package, name), "compile_cache", Recorded())
    kernel = PACKAGES["FlashAttention-4"].kernel(package, gpu // 10)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for lengths in LENGTHS:
            call_once(kernel, lengths, window)
        assert [len(keys) for keys in found.values()] == [1, 1]
        for lengths in [384], [384, 384], [4096]:
            call_once(kernel, lengths, window)
    variants = 1 if window == (9, 0) else 2
    assert [len(keys) for keys in found.values()] == [variants, variants]


def test_a_softcaps_functions_are_made_once(monkeypatch):
    """The package would make and hash new ones in each call."""
    made = []

    def counted(name):
        def make(softcap_val):
            made.append((name, softcap_val))
            return varlen_kernels.create_softcap_scoremod(softcap_val)

        return make

    names = "utils.create_softcap_scoremod", "utils.create_softcap_scoremod_bwd"
    functions = MODULES["FlashAttention-4"] | {name: counted(name) for name in names}
    install(monkeypatch, "FlashAttention-4", functions)
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    for softcap in (2.0, 3.0, 2.0):
        case = Case(
            "ring", Layout.zigzag(DOCUMENTS, 2), True, softcap=softcap, dtype=BF16,
            backend="flash_attn",
        )  # fmt: skip
        assert_right(virtual(2, run, case)[0], oracle(case), BF16, roundings=4)
    assert sorted(made) == sorted((name, softcap) for name in names for softcap in (2.0, 3.0))


@pytest.mark.parametrize(
    ("version", "expected"), [("4.0.0b23", False), ("4.0.0b24", True), (None, False)]
)
def test_flash_attention_4_computes_a_softcap_from_a_version_on(monkeypatch, version, expected):
    """Earlier versions raise an error in a backward with `cu_seqlens` and functions of scores."""
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: version)
    install(monkeypatch, "FlashAttention-4", MODULES["FlashAttention-4"])
    assert load_package("FlashAttention-4", 9).softcap == expected


@pytest.mark.parametrize(
    ("version", "major", "expected"),
    [
        ("4.0.0b11", 9, False),
        ("4.0.0b12", 9, True),
        ("4.0.0", 9, True),
        (None, 9, False),
        ("4.0.0b11", 10, True),
    ],
)
def test_flash_attention_4_is_deterministic_from_a_version_on(
    monkeypatch, version, major, expected
):
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: version)
    install(monkeypatch, "FlashAttention-4", MODULES["FlashAttention-4"])
    assert load_package("FlashAttention-4", major).deterministic == expected


def test_a_build_of_the_hub_has_no_version():
    module = types.ModuleType("flash_attn4.interface")
    assert not PACKAGES["FlashAttention-4"].kernel(module, 9).deterministic


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("always:our Triton kernels")
def test_backward_is_deterministic_unless_asked(monkeypatch, recwarn, name):
    """FlashAttention-3's flag is not trusted: our Triton kernels compute, which warns once."""
    calls = []
    varlen._warn_of_triton.cache_clear()
    backward = list(MODULES[name])[1]
    monkeypatch.setattr(triton, "backward", lambda *arguments: calls.append("triton"))

    def recorded(*args, deterministic, **options):
        calls.append(deterministic)
        return MODULES[name][backward](*args, deterministic=deterministic, **options)

    recorded.__signature__ = inspect.signature(MODULES[name][backward])
    install(monkeypatch, name, MODULES[name] | {backward: recorded})
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)

    def call(comm, deterministic):
        attn = make_attention("ring", comm, deterministic=deterministic)
        q = torch.randn(6, 2, 8).bfloat16().requires_grad_()
        with use_backend("flash_attn"):
            attn(q, q, q, Layout.zigzag(6, 1), causal=True).sum().backward()

    for deterministic in (True, True, False):
        virtual(1, call, deterministic)
    uses_triton = name == "FlashAttention-3"
    assert calls == [*2 * ["triton" if uses_triton else True], False]
    warned = [str(x.message) for x in recwarn if "our Triton kernels" in str(x.message)]
    assert len(warned) == uses_triton


def test_flash_attention_4_is_called_by_one_thread(monkeypatch):
    """It compiles kernels in its calls, and its compiler is not safe for threads."""
    inside = threading.Lock()

    def alone(function):
        def call(*args, **options):
            assert inside.acquire(blocking=False)
            time.sleep(0.01)
            results = function(*args, **options)
            inside.release()
            return results

        call.__signature__ = inspect.signature(function)
        return call

    functions = MODULES["FlashAttention-4"].items()
    install(monkeypatch, "FlashAttention-4", {name: alone(x) for name, x in functions})
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    options = {"dtype": torch.bfloat16, "backend": "flash_attn"}
    case = Case("ring", Layout.zigzag([0, 40, 41, 90], 3), causal=True, **options)
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype, roundings=4)


@pytest.mark.parametrize("name", FLASH_ATTENTION_3)
def test_flash_attention_3_stand_ins_match_their_commit(monkeypatch, name):
    """The adapter passes the arguments that it asks of the package, and no other."""
    parameters, tensors = FLASH_ATTENTION_3[name]
    functions, calls = MODULES["FlashAttention-3"], []
    signature = inspect.signature(functions[name])
    assert [str(x) for x in signature.parameters.values()] == parameters.split()

    def recorded(*args, **options):
        results = functions[name](*args, **options)
        calls.append((signature.bind(*args, **options).arguments, results))
        return results

    recorded.__signature__ = signature
    install(monkeypatch, "FlashAttention-3", functions | {name: recorded})
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)

    def call(comm):
        attn = make_attention("ring", comm, deterministic=False)
        q = torch.randn(6, 2, 8).bfloat16().requires_grad_()
        with use_backend("flash_attn"):
            attn(q, q, q, Layout.zigzag(6, 1), causal=True).sum().backward()

    virtual(1, call)
    ((arguments, results),) = calls
    assert set(arguments) == set(PACKAGES["FlashAttention-3"].parameters[name].split())
    results = results if isinstance(results, tuple) else (results,)
    assert [type(x) for x in results] == [torch.Tensor] * tensors


def install_kernel(
    repo_id,
    *,
    revision=None,
    version=None,
    backend=None,
    local_files_only=False,
    user_agent=None,
    trust_remote_code=False,
):
    """The function of the package `kernels`, with FlashAttention-3 in its cache."""
    assert local_files_only and version == 1
    if repo_id != "kernels-community/flash-attn3":
        raise FileNotFoundError(f"{repo_id} is not cached")
    return Path("/cache/snapshot/build/torch211-cxx11-cu130-x86_64-linux")


def get_local_kernel(repo_path, *, backend=None, trust_remote_code=False, user_agent=None):
    assert repo_path == Path("/cache/snapshot")
    interface = types.SimpleNamespace(__name__="interface", **MODULES["FlashAttention-3"])
    return types.SimpleNamespace(flash_attn_interface=interface)


KERNELS = {"install_kernel": install_kernel, "get_local_kernel": get_local_kernel}


def test_a_package_is_found_in_kernels_cache(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(**KERNELS))
    kernel = load_package("FlashAttention-3", 9)
    assert not isinstance(kernel, str) and not kernel.deterministic
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    not_deterministic = (("deterministic", False),)
    options = {"dtype": torch.bfloat16, "backend": "flash_attn"}
    case = Case("ring", Layout.zigzag([0, 40, 41, 90], 3), causal=True,
                module_options=not_deterministic, **options)  # fmt: skip
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype, roundings=4)
    reason = "is not installed, nor is kernels-community/flash-attn2 in the cache of kernels: "
    assert f"{reason}kernels-community/flash-attn2 is not cached" in load_package(
        "FlashAttention-2", 9
    )


def test_an_installed_package_comes_before_the_cache(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace())  # which has nothing
    install(monkeypatch, "FlashAttention-3", MODULES["FlashAttention-3"])
    assert not isinstance(load_package("FlashAttention-3", 9), str)


@pytest.mark.network
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "file"), [("install_kernel", "install"), ("get_local_kernel", "load")]
)
def test_kernels_has_the_functions_signatures(name, file, tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "kernels==0.17.2"]
    subprocess.run([*command, "-d", tmp_path], check=True)
    (archive,) = tmp_path.iterdir()
    source = zipfile.ZipFile(archive).read(f"kernels/{file}.py").decode()
    (found,) = (x for x in ast.parse(source).body if getattr(x, "name", None) == name)
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    parsed = ast.parse(inspect.getsource(KERNELS[name])).body[0]
    assert ast.unparse(found.args) == ast.unparse(parsed.args)


def broken(path):
    raise OSError("undefined symbol: _ZN3c10")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("missing", r"flash-attn-4==4.0.0b36 is not installed.*flash-attn>=2.7 is not installed"),
        ("other version", r"has no _flash_attn_fwd with the arguments return_lse: install"),
        ("earlier FlashAttention-3", r"has no _flash_attn_backward with .*window_size_left"),
        ("no function", r"flash_attn.cute.interface has no _flash_attn_bwd: install flash-attn-4"),
        ("broken", r"interface cannot be imported: OSError: undefined symbol"),
        ("lacks a dependency", r"interface cannot be imported: No module named 'cutlass'"),
    ],
)
def test_an_unusable_package_gives_its_reason(monkeypatch, case, reason):
    name, functions = "FlashAttention-4", MODULES["FlashAttention-4"]

    def fail(error):
        def imported(path):
            if path == PACKAGES[name].modules[0]:
                raise error
            raise ModuleNotFoundError(f"No module named {path!r}", name=path)

        monkeypatch.setattr(flash_attn.importlib, "import_module", imported)

    if case == "other version":
        forward = lambda q, k, v, causal, softmax_scale: None  # noqa: E731
        install(monkeypatch, name, functions | {"_flash_attn_fwd": forward})
        reason = r"has no _flash_attn_fwd with the arguments return_lse, .*: install flash-attn-4"
    elif case == "earlier FlashAttention-3":  # before it had separate sides of a window
        backward = lambda window_size: None  # noqa: E731
        install(monkeypatch, case[8:], MODULES[case[8:]] | {"_flash_attn_backward": backward})
        reason += r".*: install flash-attn-3 .*commit 01afd16d"
    elif case == "no function":
        install(monkeypatch, name, {"_flash_attn_fwd": functions["_flash_attn_fwd"]})
    elif case == "broken":
        fail(OSError("undefined symbol: _ZN3c10"))
    elif case == "lacks a dependency":
        fail(ModuleNotFoundError("No module named 'cutlass'", name="cutlass"))
    else:
        fail(ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match=f"(?s)needs a package: .*{reason}"):
        raise AssertionError(flash_attn.refusal(q, q))


def test_the_next_package_computes_in_its_place(monkeypatch):
    """Only flash-attn is whole: FlashAttention-4 lacks a function."""
    install(monkeypatch, "FlashAttention-4", {})
    install(monkeypatch, "FlashAttention-2", MODULES["FlashAttention-2"])
    sys.modules["flash_attn"].cute = None
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    options = flash_attn.CallOptions(1.0, 0.0, "flash_attn", True)
    kernel = flash_attn.kernel_for(HeadDims.of(q, q), options, False, q.device)
    assert kernel is load_package("FlashAttention-2", 9)


def test_other_operands_are_refused():
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    assert flash_attn.refusal(q, q).startswith("q must be bf16 or fp16 on a CUDA device")


@pytest.mark.network
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES)
def test_stand_ins_have_the_packages_signatures(source, tmp_path):
    """The sources are read, and not imported."""
    arguments, path = SOURCES[source]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *arguments]
    no_build = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*command, "-d", tmp_path], check=True, env=os.environ | no_build)
    (archive,) = tmp_path.iterdir()
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(tmp_path / "source")
    else:
        shutil.unpack_archive(archive, tmp_path / "source", filter="data")
    (file,) = (tmp_path / "source").rglob(path)
    texts = [x.read_text() for x in (file, file.with_name("utils.py")) if x.exists()]
    nodes = [x for text in texts for x in ast.walk(ast.parse(text))]
    functions = {x.name: x for x in nodes if isinstance(x, ast.FunctionDef)}
    for name, stand_in in MODULES[source.removeprefix("the newest ")].items():
        found = functions[name.removeprefix("utils.")]
        for argument in (*found.args.args, *found.args.kwonlyargs):
            argument.annotation = None
        parsed = ast.parse(inspect.getsource(stand_in)).body[0]
        assert ast.unparse(found.args) == ast.unparse(parsed.args)
        results = [
            len(x.value.elts)
            for x in ast.walk(found)
            if isinstance(x, ast.Return) and isinstance(x.value, ast.Tuple)
        ]
        expected = {"_flash_attn_fwd": 5, "_flash_attn_bwd": 3, "_flash_attn_varlen_forward": 4}
        assert name not in expected or expected[name] in results
