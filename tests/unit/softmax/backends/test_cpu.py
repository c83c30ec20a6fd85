"""In which precision CPUs compute half-precision attention: by what they have, and by who made
them."""

from pathlib import Path

import pytest
import torch

from seqpar.softmax.backends import cpu

BF16, FP16, LONG = torch.bfloat16, torch.float16, 1537
CPUINFO = Path("/proc/cpuinfo")


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
    monkeypatch.setattr(cpu, "cpu_has_matrix_units", lambda: matrix_units)
    monkeypatch.setattr(cpu, "cpu_has_bf16_products", lambda: products)
    monkeypatch.setattr(cpu, "_vendor", lambda: vendor)
    monkeypatch.setattr(cpu, "_backward_is_faster", cpu._backward_is_faster.__wrapped__)
    assert cpu.computes_forward(dtype) == forward
    assert cpu.computes_backward(dtype, query_end) == backward


@pytest.mark.skipif(not CPUINFO.exists(), reason="not on Linux")
def test_the_vendor_is_read_where_linux_says_it():
    assert cpu._vendor() in ("", *CPUINFO.read_text().split())
