"""The dtypes of results that travel follow from what all ranks know."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqpar.kernels.gpus import Gpu

from seqpar import Layout
from seqpar.attention.backend import DEFAULT
from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.memo import Memo
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Mask, slices_between
from seqpar.softmax import result_dtypes as rules
from seqpar.softmax.backends import aten_cuda, kernel_order
from seqpar.softmax.backends.kernel_order import best_backend, preferred_kernel
from seqpar.softmax.backends.varlen import HeadDims
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.result_dtypes import hops_are_one_call, is_one_call, result_dtypes
from tests.support.cases import cu_seqlens, layouts

BF16, CUDA, META = torch.bfloat16, torch.device("cuda", 0), torch.device("meta")
OPTIONS = CallOptions(1.0, 0.0, DEFAULT, True)


@given(st.data())
def test_hops_known_to_be_one_call_are_one(data):
    """Of all pairs of different ranks between which rows travel, in both passes."""
    cu = data.draw(cu_seqlens(60))
    ranks = data.draw(st.integers(2, 5))
    geometry = data.draw(layouts(cu, ranks)).geometry
    size = data.draw(st.integers(1, 2))
    geometry = geometry.merged_ranks(size) if size > 1 else geometry
    mask = Mask(UNLIMITED, data.draw(st.sampled_from([0, UNLIMITED])))
    if not hops_are_one_call(geometry, geometry, mask):
        return
    for q_rank, k_rank in itertools.permutations(range(geometry.ranks), 2):
        slices = slices_between(geometry, q_rank, geometry, k_rank, mask)
        for backward in (False, True):
            assert is_one_call(slices, backward) or not slices.area


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_hops_of_usual_layouts_are_known(kind):
    geometry = getattr(Layout, kind)([0, 9, 70], 4).geometry
    for right in (0, UNLIMITED):
        assert hops_are_one_call(geometry, geometry, Mask(UNLIMITED, right))
    assert not hops_are_one_call(geometry, geometry, Mask(5, 0))
    striped = Layout.striped([0, 9, 70], 4, 2).geometry
    assert not hops_are_one_call(striped, striped, Mask(UNLIMITED, 0))


def call_on(device, **changes):
    shape = OperandShape(BF16, 1, 4, 2, 64, 64)
    layout = Layout.zigzag([0, 64], 2).geometry
    fields = {"shape": shape, "options": OPTIONS, "device": device, "layout": layout} | changes
    return SimpleNamespace(once=Memo(), **fields)


def test_a_meta_device_stands_for_flash_attention_4():
    assert result_dtypes(None, call_on(META), True).of(lambda: True) is BF16
    assert result_dtypes(None, call_on(META), True).of(lambda: False) is torch.float32
    for call in (
        call_on(torch.device("cpu")),
        call_on(META, options=OPTIONS._replace(slopes=torch.ones(1, 4))),
        call_on(META, shape=OperandShape(torch.float32, 1, 4, 2, 64, 64)),
        call_on(META, layout=Layout.contiguous([0, 64], 2, equal=True, most_documents=3).geometry),
    ):
        assert result_dtypes(None, call, False).of(lambda: True) is torch.float32


def test_ranks_with_different_kernels_send_fp32(monkeypatch):
    kernel = kernel_order._ON_META
    monkeypatch.setattr(rules, "preferred_kernel", lambda *_: kernel)
    monkeypatch.setattr(rules, "described_kernels", lambda device: "kernels")
    comm = Comm("alone", 0, 2)
    assert result_dtypes(comm, call_on(CUDA), True).of(lambda: True) is BF16
    monkeypatch.setattr(comm, "have_equal", lambda name, text: text != "kernels")
    assert result_dtypes(comm, call_on(CUDA), True).of(lambda: True) is torch.float32


def test_triton_computes_what_must_be_deterministic(monkeypatch):
    """Its gradients are fp32; results of forward are still those of the other kernel."""
    kernel = kernel_order._ON_META._replace(deterministic=False)
    monkeypatch.setattr(rules, "preferred_kernel", lambda *_: kernel)
    dtypes = [result_dtypes(None, call_on(CUDA), backward) for backward in (False, True)]
    assert [x.of(lambda: True) for x in dtypes] == [BF16, torch.float32]
    call = call_on(CUDA, options=OPTIONS._replace(deterministic=False))
    assert result_dtypes(None, call, True).of(lambda: True) is BF16


@pytest.mark.parametrize(
    ("major", "loaded", "expected"),
    [
        (9, {"FlashAttention-4": 1}, 1),
        (9, {"FlashAttention-3": 2}, 2),
        (9, {"FlashAttention-2": 3}, None),  # cuDNN and Triton may compute
        (8, {"FlashAttention-2": 3}, 3),
        (8, {}, "aten"),
    ],
)
def test_only_a_kernel_that_computes_all_blocks_is_preferred(monkeypatch, major, loaded, expected):
    kernels = {
        name: kernel_order._ON_META._replace(max_head_dim=128 + x) for name, x in loaded.items()
    }
    load = lambda name, x: kernels.get(name, "is not installed")  # noqa: E731
    found = lambda *_: next(iter(kernels.values()), None)  # noqa: E731
    monkeypatch.setattr(kernel_order, "load_package", load)
    monkeypatch.setattr(kernel_order.flash_attn, "kernel_for", found)
    monkeypatch.setattr(aten_cuda, "gpu_of", lambda device: Gpu("stand-in", major, 132))
    monkeypatch.setattr(
        kernel_order, "load_cudnn", lambda x: "no" if x == 8 else kernel_order._ON_META
    )
    kernel = preferred_kernel(HeadDims(BF16, 64, 64), OPTIONS, CUDA)
    if expected == "aten":
        assert kernel is kernel_order.aten_cuda.KERNEL
    else:
        assert (kernel and kernel.max_head_dim - 128) == expected


@pytest.mark.parametrize("backend", [DEFAULT, "aten", "flash_attn"])
def test_no_kernel_is_preferred_on_old_gpus(monkeypatch, backend):
    """Plain PyTorch computes there, in fp32."""
    monkeypatch.setattr(aten_cuda, "gpu_of", lambda device: Gpu("T4", 7, 40))
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16, device="meta")
    assert preferred_kernel(HeadDims.of(q, q), OPTIONS._replace(backend=backend), CUDA) is None
    monkeypatch.setattr(kernel_order, "device_of", lambda x: CUDA)
    slices = slices_between(*[Layout.zigzag([0, 64], 2).geometry, 0] * 2, Mask(UNLIMITED, 0))
    assert best_backend(q, q, slices, OPTIONS) == "aten"


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_are_compared_whatever_dtypes_are_chosen(monkeypatch, backward):
    """A graph may capture a later pass, for which none is chosen."""
    names, comm = [], Comm("alone", 0, 2)
    monkeypatch.setattr(rules, "described_kernels", lambda device: "kernels")
    monkeypatch.setattr(comm, "have_equal", lambda name, text: names.append(name))
    assert result_dtypes(comm, call_on(CUDA), backward, torch.float16).of_several is torch.float16
    assert names == ["kernels of attention"]
