"""What only a GPU can show: length, memory accesses, and the kernels as users call them."""

import shutil
import subprocess
import sys

import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from tests.ranks import virtual

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def attention(q, k, v, layout, **options):
    """Forward and backward of one rank with our kernels: out, lse, dq, dk, dv."""

    def call(comm):
        x, y, z = (t.detach().requires_grad_() for t in (q, k, v))
        with use_backend("triton"):
            out, lse = make_attention("ring", comm)(x, y, z, layout, return_lse=True, **options)
        out.backward(torch.ones_like(out))
        return out.detach(), lse.detach(), x.grad, y.grad, z.grad

    return virtual(1, call)[0]


def test_a_million_tokens():
    """Sampled rows of a causal document of 2**20 tokens against fp64."""
    n, dim = 2**20, 64
    q, k, v = (torch.randn(n, 1, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse, *_ = attention(q, k, v, Layout.contiguous(n, 1), causal=True)
    for row in (0, 127, 128, n // 3, n - 1):
        scores = k[: row + 1, 0].double() @ q[row, 0].double() * dim**-0.5
        expected = torch.softmax(scores, 0) @ v[: row + 1, 0].double()
        assert (out[row, 0].double() - expected).norm() <= 2e-2 * expected.norm()
        assert abs(float(lse[row, 0]) - float(torch.logsumexp(scores, 0))) <= 1e-4


def test_more_than_2_to_the_31_elements():
    """36,864 tokens × 512 heads × 128: the last tokens lie beyond 2**31 elements. They equal the same heads alone."""
    n, heads, dim = 36864, 512, 128
    q = torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    layout, window = Layout.contiguous(n, 1), (255, 0)
    everything = attention(q, q, q, layout, causal=True, window_size=window)
    alone = attention(*(q[:, -4:].contiguous() for _ in range(3)), layout, causal=True, window_size=window)
    for x, y in zip(everything, alone, strict=True):
        assert torch.equal(x[:, -4:], y)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(500)
def test_compute_sanitizer(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
    tests = ["tests/test_flash_attention.py", "-k", "hops or one_pass or neighbours", "-p", "no:cacheprovider"]
    subprocess.run([*command, *tests], check=True, timeout=480)
