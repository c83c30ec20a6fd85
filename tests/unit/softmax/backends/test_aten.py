"""The aten backend on CUDA, with meta tensors that pass for CUDA tensors; and its choice of a
precision on CPUs, by the CPU's features and vendor."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from seqpar.softmax.attend import choose_backend
from seqpar.softmax.backends import aten, aten_cuda, kernel_order, reference, triton
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

BF16, FP16, LONG = torch.bfloat16, torch.float16, 1537
CPUINFO = Path("/proc/cpuinfo")
CAUSAL, WINDOW = Mask(UNLIMITED, 0), Mask(20, 0)


@pytest.fixture(autouse=True)
def meta_passes_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    monkeypatch.setattr(aten_cuda, "is_recent", lambda device: True)
    monkeypatch.setattr(kernel_order, "gpu_major", lambda device: 8)
    monkeypatch.setattr(launching, "_run", lambda launch, tensors: None)


def call(device="meta", mask=CAUSAL, dim=16, dtype=torch.bfloat16, dlse=False, **options):
    """Forward and backward over 100 tokens; return out, lse and dq."""
    geometry = Layout.contiguous(100, 1).geometry
    slices = slices_between(geometry, 0, geometry, 0, mask)
    defaults = {"softcap": 0.0, "backend": "aten", "deterministic": True}
    chosen = CallOptions(0.25, **defaults | options)
    q, k, v = (torch.zeros(1, 100, n, dim, dtype=dtype, device=device) for n in (4, 2, 2))
    partial = Partial.nothing(q, v)
    backend = choose_backend(q, k, v, slices, chosen)
    backend.forward(q, k, v, slices, partial, chosen)
    out, lse = partial.finish(None, dtype)
    output = OutputGradient.of(out, lse if dlse else None, out, lse, None)
    gradients = PartialGradients.zeros(q, k, v)
    backend.backward(output, q, k, v, slices, gradients, chosen)
    return out, lse, gradients.dq


@pytest.fixture
def backwards(monkeypatch):
    """The kernels that compute backward on CUDA, each with an operator of another thread meanwhile.

    Torch refuses the operator in the mode in which it refuses kernels whose bits vary.
    """
    seen, kernel = [], aten_cuda.cuda_attention_backward()

    def elsewhere():
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))

    def recorded(name, result):
        def run(*args, **options):
            with ThreadPoolExecutor(1) as other:
                other.submit(elsewhere).result()
            seen.append((name, torch.get_deterministic_debug_mode()))
            return result and result(*args, **options)

        return run

    monkeypatch.setattr(aten_cuda, "cuda_attention_backward", lambda: recorded("aten", kernel))
    monkeypatch.setattr(triton, "backward", recorded("triton", None))
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["triton"]),
        ({"dlse": True}, ["triton"]),
        ({"deterministic": False}, ["aten"]),
        ({"mask": WINDOW}, ["triton"]),
        ({"mask": WINDOW, "deterministic": False}, ["aten"]),
        ({"softcap": 2.0}, []),
        ({"slopes": torch.ones(1, 4, device="meta")}, []),
        ({"dtype": torch.float32}, []),
        ({"device": "cpu"}, []),
    ],
)
def test_backward_leaves_other_threads_alone(backwards, options, expected):
    call(**options)
    assert backwards == [(name, 0) for name in expected]


def test_old_gpus_compute_in_plain_torch(monkeypatch, backwards):
    monkeypatch.setattr(aten_cuda, "is_recent", lambda device: False)
    call()
    assert backwards == []


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, (1, 1)),
        ({"dim": 256}, (1, 1)),
        ({"dim": 256, "dlse": True}, (1, 0)),  # v gets columns, and the kernel takes 256 at most
        ({"dim": 257}, (0, 0)),
        ({"mask": WINDOW}, (1, 1)),
    ],
)
def test_plain_torch_computes_the_kernels_exceptions(monkeypatch, options, fused):
    monkeypatch.setattr(triton, "backward", lambda *arguments: None)
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
