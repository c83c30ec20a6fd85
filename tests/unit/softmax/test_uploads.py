"""A layout's first call sends all of its tables to the device in one copy. Later calls send none,
index with no table of the host's, and read no number back.

The meta device stands in for a GPU."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Mask, use_backend
from seqpar.core import device_tables
from seqpar.core.device_tables import (
    UploadedTables,
    kept_on,
    on_device,
    on_stream,
    rehearse,
    upload,
)
from seqpar.core.memo import Memo
from seqpar.layout import handle
from seqpar.softmax.backends import aten_cuda, kernel_order
from seqpar.softmax.compute import waiting_results
from seqpar.softmax.compute.partial import QuerySums
from seqpar.softmax.keys import rank_invariant_plan
from seqpar.softmax.softmax_operator import ATTENTION
from seqpar.softmax.wire.row_messages import Rows
from tests.support.cases import STRATEGIES, VARIANTS, module
from tests.support.same_bits import STRATEGIES as SAME_BITS
from tests.support.steady import RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

META = torch.device("meta")
LAYOUTS = ["zigzag", "uneven", "contiguous", "striped", "uneven"]
MASKS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (20, 0)},
    "prefix": {"causal": True, "prefix_lens": [30, 0, 0, 5, 0, 64]},
    "ranges": {"mask": Mask.of_ranges([(0, 0, 20, 0, 20, None, 0), (5, 0, 60, 0, 9, None, None)])},
}
ONE_COPY = {"aten._to_copy.default": 1}


def call(attn, layout, backward=True, **options):
    """A forward and a backward through the operators, as below autograd."""
    shape = 1, layout.tokens_on(attn.rank)
    q, k, v, dout = (
        torch.empty(*shape, heads, 16, dtype=torch.bfloat16, device="meta")
        for heads in (16, 8, 8, 16)
    )
    for x in (q, k, v):
        x.requires_grad_(backward)
    inputs, arguments, _ = attn._operator_inputs(q, k, v, layout, **options)
    carried = ATTENTION.arguments.flat(arguments)
    with torch.no_grad():
        out, lse, numbers, *kept = ATTENTION._forward(*inputs, *carried)
        if not backward:
            return
        saved = ATTENTION.save(attn._bound, inputs, arguments, [out, lse], kept)
        tensors = [x.detach() for x in saved.tensors if x is not None]
        given = [x is not None for x in saved.tensors]
        dlse = torch.empty_like(lse) if arguments.return_lse else None
        ATTENTION._backward(dout, dlse, tensors, given, saved.sizes, numbers, *carried)


def copies(attn, layout, **options):
    """By name, the operators in which the host copies to the device or waits for it."""
    with HostWaits() as waits:
        call(attn, layout, **options)
    return dict(waits.found)


@pytest.fixture
def fresh(monkeypatch):
    """Kernels do not run, and a layout has no tables yet."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    monkeypatch.setattr(handle, "_by_digest", weakref.WeakValueDictionary())
    return lambda name: layouts(stripe=4)[name]


@few_rows()
@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
def test_tables_travel_once(strategy, backend, fresh):
    found = []
    with use_backend(backend):
        for rank, name, mask in zip((0, 1, 3, 0, 3), LAYOUTS, MASKS, strict=True):
            attn, layout = module(strategy, SilentComm(rank, RANKS)), fresh(name)
            found.append(copies(attn, layout, **MASKS[mask]))
            assert copies(attn, layout, **MASKS[mask]) == {}
    assert all(first in (ONE_COPY, {}) for first in found)  # some ranks need no tables
    assert backend != "triton" or found.count(ONE_COPY) >= 3


OPTIONS_OF_MODULES = [
    *(("triton", strategy, {"deterministic": "ranks"}) for strategy in SAME_BITS),
    *(("triton", strategy, {"keep": "tokens"}) for strategy in ("ulysses", "usp")),
    ("reference", "ring", {}),
]


@pytest.mark.parametrize(("backend", "strategy", "options"), OPTIONS_OF_MODULES, ids=str)
def test_tables_of_modules_options_travel_once(backend, strategy, options, fresh, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 32)
    with use_backend(backend):
        attn = module(strategy, SilentComm(1, RANKS), **options)
        layout = fresh("zigzag")
        first = copies(attn, layout, causal=True)
        assert first == ONE_COPY or (backend != "triton" and not first)
        assert copies(attn, layout, causal=True) == {}


@few_rows()
@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"return_max_logits": True},
        {"softcap": 1.0},
        {"alibi_slopes": torch.empty(16, device="meta")},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_tables_of_options_travel_once(options, backend, fresh):
    layout, attn = fresh("striped"), module("token_ring", SilentComm(1, RANKS))
    with use_backend(backend):
        assert copies(attn, layout, causal=True, **options) == ONE_COPY
        assert copies(attn, layout, causal=True, **options) == {}


@pytest.mark.parametrize("deterministic", [True, False])  # backward by our kernels, or ATen's
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_tables_of_varlen_kernels_travel_once(strategy, deterministic, fresh, monkeypatch):
    results = lambda q, *_, **__: (  # noqa: E731
        torch.empty_like(q),
        torch.empty(q.shape[1], q.shape[0], device=q.device),
    )
    gradients = lambda dout, q, k, v, *_, **__: map(torch.empty_like, (q, k, v))  # noqa: E731
    monkeypatch.setattr(aten_cuda, "computes", lambda q: True)
    monkeypatch.setattr(kernel_order, "gpu_major", lambda device: 8)
    monkeypatch.setattr(aten_cuda, "cuda_attention", lambda: results)
    monkeypatch.setattr(aten_cuda, "cuda_attention_backward", lambda: gradients)
    monkeypatch.setattr(
        waiting_results, "is_on_cuda", lambda x: True
    )  # hops are merged by the kernel
    layout = fresh("uneven")
    attn = module(strategy, SilentComm(1, RANKS), deterministic=deterministic)
    assert copies(attn, layout, causal=True) == ONE_COPY
    assert copies(attn, layout, causal=True) == {}


def test_inference_sends_no_tables_of_backward(fresh):
    layout, attn = fresh("zigzag"), module("ring", SilentComm(1, RANKS))
    with use_backend("triton"):
        assert copies(attn, layout, backward=False, causal=True) == ONE_COPY
        assert copies(attn, layout, causal=True) == ONE_COPY
        assert copies(attn, layout, causal=True) == {}


def test_uploaded_tables_keep_dtype_shape_and_alignment(monkeypatch):
    tables = [torch.arange(3, dtype=torch.int32).view(1, 3), torch.arange(5), torch.empty(0, 6)]
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: moved.append(x) or x.clone())
    assert upload(tables, META)
    for x in tables:
        copy = on_device(x, META)
        assert copy.equal(x) and copy.dtype == x.dtype and copy.shape == x.shape
        assert copy.storage_offset() * x.itemsize % 16 == 0
    assert len(moved) == 1


def test_other_streams_wait_for_every_copy(monkeypatch):
    class Stream:
        def __init__(self, name):
            self.record_event = lambda: name
            self.wait_event = lambda event: waited.append((name, event))

    waited, recorded, streams = [], [], {name: Stream(name) for name in "ab"}
    monkeypatch.setattr(device_tables, "_copied", {META: {streams["a"]: "a"}})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["a"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.append(stream))
    table = torch.arange(3)
    first = UploadedTables([table], META)
    first.wait()
    assert first.copied and not waited and not recorded
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["b"])
    second = UploadedTables([table], META)  # it finds the tables of the first
    second.wait()
    first.wait()
    assert not second.copied and waited == [("b", "a")] * 2
    assert recorded == [streams["b"]] * 2  # the memory stays until this stream has read it


def test_streams_compute_their_own_tensors(monkeypatch):
    """Nothing orders streams, and a graph's memory has no values until it is replayed."""
    device, memo, made = torch.device("cuda", 0), Memo(), itertools.count()

    def at(stream, captures=False):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
        return on_stream(device, memo, ("weights",), made.__next__)

    assert [at("a"), at("b"), at("a"), at("a", True), at("c", True), at("c")] == [0, 1, 0, 2, 3, 4]


def test_tables_copied_in_inference_can_be_saved():
    table = torch.arange(3)
    with torch.inference_mode():
        assert not on_device(table, META).is_inference()


def test_kept_plans_wait_for_copies_of_other_streams(monkeypatch):
    waits = []
    monkeypatch.setattr(UploadedTables, "wait", lambda self: waits.append(self))
    memo, build = Memo(), lambda: [torch.arange(3), (torch.arange(4), slice(1))]
    for _ in range(2):
        (first, (second, third)) = kept_on(META, memo, ("plan",), build)
        assert first.is_meta and second.is_meta and third == slice(1)
    assert len(waits) == 2 and waits[0] is waits[1]
    kept_on(META, memo, ("another",), lambda: memo(("plan",), build))  # it copies no tables
    assert len(waits) == 2


def test_a_captured_first_call_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="a call with the same options before a CUDA graph captures"
    ):
        on_device(torch.arange(3), torch.device("cuda", 0))


def test_prepared_tables_of_backward_travel_with_a_forward(fresh):
    """In compiled code tensors do not say that they will be differentiated."""
    attn, sizes = module("ring", SilentComm(1, RANKS)), {"heads": 16, "kv_heads": 8}
    with use_backend("triton"):
        prepare = attn.preparation(
            **sizes, head_dim=16, dtype=torch.bfloat16, device="meta", causal=True
        )
        layout = prepare(fresh("zigzag"))
        assert copies(attn, layout, backward=False, causal=True) == ONE_COPY
        assert copies(attn, layout, causal=True) == {}


@pytest.mark.parametrize("waits", [True, False])
def test_a_rehearsal_requests_what_adding_gradients_of_queries_reads(waits):
    """A kernel that adds several results reads the places of their rows; PyTorch reads indices."""
    rows = Rows(np.array([[0, 2], [4, 6]]))
    with rehearse(torch.device("cuda")) as rehearsal:
        sums = QuerySums(torch.empty(1, 8, 2, 4, device="meta"), torch.float32)
        if not waits:
            sums.allocate()
        for _ in range(2):
            sums.add(rows, torch.empty(1, 4, 2, 4, device="meta"))
        sums.add_up()  # launches no kernel
    expected = [0, 1, -1, -1, 2, 3, -1, -1] if waits else [0, 1, 4, 5]
    assert [x.tolist() for x in rehearsal.tables.values()] == [expected]
