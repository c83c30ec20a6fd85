"""The aten backend on CUDA, with meta tensors that pass for CUDA tensors; its determinism switch;
and its choice of a precision on CPUs, by the CPU's features and vendor."""

import threading
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor

from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from seqpar.softmax.backends import aten, reference
from seqpar.softmax.backends.aten import deterministic_kernels
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

BF16, FP16, LONG = torch.bfloat16, torch.float16, 1537
CPUINFO = Path("/proc/cpuinfo")
CAUSAL, WINDOW = Mask(UNLIMITED, 0), Mask(20, 0)


@pytest.fixture(autouse=True)
def meta_passes_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    monkeypatch.setattr(aten, "is_recent", lambda device: True)


def call(device="meta", mask=CAUSAL, dim=16, dtype=torch.bfloat16, dlse=False, **options):
    """Forward and backward over 100 tokens; return out, lse and dq."""
    geometry = Layout.contiguous(100, 1).geometry
    slices = slices_between(geometry, 0, geometry, 0, mask)
    defaults = {"softcap": 0.0, "backend": "aten", "deterministic": True}
    chosen = CallOptions(0.25, **defaults | options)
    q, k, v = (torch.zeros(1, 100, n, dim, dtype=dtype, device=device) for n in (4, 2, 2))
    partial = Partial.nothing(q, v)
    aten.forward(q, k, v, slices, partial, chosen)
    out, lse = partial.finish(None, dtype)
    output = OutputGradient.of(out, lse if dlse else None, out, lse, None)
    gradients = PartialGradients.zeros(q, k, v)
    aten.backward(output, q, k, v, slices, gradients, chosen)
    return out, lse, gradients.dq


@pytest.fixture
def modes(monkeypatch):
    """The debug mode in each call of a kernel's backward on CUDA."""
    seen, kernel = [], aten.cuda_attention_backward()

    def recorded(*args, **options):
        seen.append(torch.get_deterministic_debug_mode())
        return kernel(*args, **options)

    monkeypatch.setattr(aten, "cuda_attention_backward", lambda: recorded)
    yield seen
    torch.set_deterministic_debug_mode(0)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("flag", [False, True])
def test_the_switch_is_on_for_the_kernel_alone(modes, before, flag):
    torch.set_deterministic_debug_mode(before)
    with inductor.patch(deterministic=flag):
        call()
        assert inductor.deterministic == flag
    assert modes == [2]
    assert torch.get_deterministic_debug_mode() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"deterministic": False}, [0]),
        ({"mask": WINDOW}, []),  # no piece is without a mask
        ({"softcap": 2.0}, []),
        ({"slopes": torch.ones(1, 4, device="meta")}, []),
        ({"dtype": torch.float32}, []),
        ({"device": "cpu"}, []),
        ({"device": "cpu", "mask": WINDOW}, []),
    ],
)
def test_the_switch_is_left_alone_without_need(modes, monkeypatch, options, expected):
    def refused(mode):
        raise AssertionError

    monkeypatch.setattr(torch, "set_deterministic_debug_mode", refused)
    call(**options)
    monkeypatch.undo()
    assert modes == expected


def test_threads_share_the_switch():
    inside, left = threading.Event(), threading.Event()
    found = []

    def other():
        with deterministic_kernels():
            inside.set()
            left.wait(10)
            found.append(torch.get_deterministic_debug_mode())

    thread = threading.Thread(target=other)
    with deterministic_kernels():
        thread.start()
        inside.wait(10)
    left.set()
    thread.join(10)
    assert found == [2] and torch.get_deterministic_debug_mode() == 0


def test_what_others_set_meanwhile_stays():
    try:
        with deterministic_kernels():
            torch.set_deterministic_debug_mode("warn")
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode(0)


def test_old_gpus_compute_in_plain_torch(monkeypatch, modes):
    monkeypatch.setattr(aten, "is_recent", lambda device: False)
    call()
    assert modes == []


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, (1, 1)),
        ({"dim": 256}, (1, 1)),
        ({"dim": 256, "dlse": True}, (1, 0)),  # v gets a column, and the kernel takes 256 at most
        ({"dim": 257}, (0, 0)),
        ({"mask": WINDOW}, (0, 0)),
    ],
)
def test_plain_torch_computes_the_kernels_exceptions(monkeypatch, options, fused):
    calls = {"forward": 0, "backward": 0}
    for way in calls:
        plain = getattr(reference, way)

        def counted(*args, way=way, plain=plain):
            calls[way] += 1
            return plain(*args)

        monkeypatch.setattr(reference, way, counted)
    out, lse, dq = call(**options)
    assert (1 - calls["forward"], 1 - calls["backward"]) == fused
    assert out.is_meta and lse.is_meta and dq.is_meta


@pytest.mark.parametrize(
    ("matrix_units", "products", "vendor", "dtype", "query_end", "forward", "backward"),
    [
        (True, True, "GenuineIntel", BF16, LONG, True, True),
        (True, True, "GenuineIntel", BF16, 1536, True, False),
        (True, True, "GenuineIntel", FP16, LONG, False, False),
        (False, True, "GenuineIntel", BF16, LONG, False, False),
        (False, True, "AuthenticAMD", BF16, LONG, False, True),
        (False, True, "AuthenticAMD", BF16, 1536, False, False),
        (False, False, "AuthenticAMD", BF16, LONG, False, False),
        (False, False, "", BF16, LONG, False, False),
    ],
)
def test_the_precision_follows_the_cpu(
    monkeypatch, matrix_units, products, vendor, dtype, query_end, forward, backward
):
    monkeypatch.setattr(aten, "cpu_has_matrix_units", lambda: matrix_units)
    monkeypatch.setattr(aten, "cpu_has_bf16_products", lambda: products)
    monkeypatch.setattr(aten, "_cpu_vendor", lambda: vendor)
    monkeypatch.setattr(aten, "_backward_is_faster", aten._backward_is_faster.__wrapped__)
    assert aten.half_is_faster_in_forward(dtype) == forward
    assert aten.half_is_faster_in_backward(dtype, query_end) == backward


@pytest.mark.skipif(not CPUINFO.exists(), reason="not on Linux")
def test_the_vendor_is_read_where_linux_says_it():
    assert aten._cpu_vendor() in ("", *CPUINFO.read_text().split())
