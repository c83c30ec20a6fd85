"""What only a GPU can show: length, memory accesses, and the kernels as users call them."""

import dataclasses
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.efficiency import Alone
from seqpar import Layout, make_attention, use_backend
from seqpar.linear.inputs import Inputs
from seqpar.linear.states.backends import triton as backend
from seqpar.linear.states.state_options import StateOptions
from seqpar.servers.server.compute import compute
from tests.kernels.lightning_cases import arranged, spans_of
from tests.support.ranks import virtual
from tests.support.requests import random_request
from tests.support.servers import connect, running

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# What compute-sanitizer runs, which makes tests many times slower: a few tests of each kernel.
SANITIZED = {
    "merges": [
        "tests/kernels/test_merge_hops.py",
        *("-k", "(one_launch and 8) or no_hop_has or sinks_join or rows_of_an_index"),
    ],
    "attention": [
        *("tests/kernels/test_flash_attention.py", "tests/kernels/test_lightning_attention.py"),
        *("-k", "hops or one_pass or neighbours or length_of_segments or not_causal"),
    ],
}


def attention(q, k, v, layout, **options):
    """Forward and backward of one rank with our kernels: out, lse, dq, dk, dv."""

    def call(comm):
        x, y, z = (t.detach().requires_grad_() for t in (q, k, v))
        with use_backend("triton"):
            out, lse = make_attention("ring", comm)(x, y, z, layout, return_lse=True, **options)
        out.backward(torch.ones_like(out))
        return out.detach(), lse.detach(), x.grad, y.grad, z.grad

    return virtual(1, call)[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("backend", ["", "triton"])
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "token_ring", "ulysses"])
def test_only_the_first_call_copies_tables(strategy, backend):
    """All of forward and backward in one copy from pinned memory; no later call waits.

    A later call has the same bits, given the same noise in place of other ranks' messages.
    """
    ranks, rank = 8, 3
    layout = Layout.zigzag([0, 700, 701, 1500, 4096], ranks)
    shapes = [(layout.tokens_on(rank), heads, 64) for heads in (16, 8, 8)]
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(shape, **made) for shape in shapes)
    attn = make_attention(strategy, Alone(rank, ranks))

    def call(mode):
        torch.manual_seed(0)
        q.grad = k.grad = v.grad = None
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                out = attn(q, k, v, layout, causal=True)
                out.backward(torch.ones_like(out))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        names = [x.name for x in profiler.events()]
        copies = [name for name in names if name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
        return copies, (out, q.grad, k.grad, v.grad)

    with use_backend(backend) if backend else nullcontext():
        copies, first = call("default")
        assert copies == ["Memcpy HtoD (Pinned -> Device)"]
        copies, second = call("error")
        assert copies == [] and all(map(torch.equal, first, second))


@pytest.mark.parametrize("backend", ["", "triton"])
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_calls_of_one_layout_replay_in_a_graph(strategy, backend):
    """A captured graph of forward and backward also computes other values of q, k and v."""
    layout = Layout.zigzag([0, 700, 1024], 1)
    operands = [torch.randn(1024, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    operands = [x.requires_grad_() for x in operands]

    def call(comm):
        attn = make_attention(strategy, comm)

        def results():
            out = attn(*operands, layout, causal=True)
            return out, *torch.autograd.grad(out, operands, torch.ones_like(out))

        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(2):
                results()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results()
        with torch.no_grad():
            for x in operands:
                x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        return captured, results()

    with use_backend(backend) if backend else nullcontext():
        ((captured, expected),) = virtual(1, call)
    for x, y in zip(captured, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_a_graph_computes_the_documents_of_loaded_tables():
    sizes = {"equal": True, "multiple_of": 128, "most_documents": 4}
    layout, other = (Layout.contiguous(cu, 1, **sizes) for cu in ([0, 700, 1000], [0, 9, 64, 1001]))
    q, k, v, dout = (torch.randn(1024, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkvd")
    operands = [x.requires_grad_() for x in (q, k, v)]

    def call(comm):
        attn = make_attention("ring", comm)

        def results(layout):
            out = attn(*operands, layout, causal=True)
            return out, *torch.autograd.grad(out, operands, dout)

        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            results(layout)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(layout)
        for loaded in (other, Layout.contiguous([0, 700, 1000], 1, **sizes)):
            layout.load_tables(loaded)
            graph.replay()
            torch.cuda.synchronize()
            for x, expected in zip(captured, results(loaded), strict=True):
                torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-2)

    virtual(1, call)


def test_servers_copy_through_pinned_memory():
    """Tensors pass from a trainer to a server and back; the bits equal a local computation."""
    request = random_request(0, 4096, 4096, heads=4, dim=64, dtype=torch.bfloat16)
    on_gpu = {name: getattr(request, name).cuda() for name in "qkv"}
    request = dataclasses.replace(request, **on_gpu)
    with (
        running("tcp://127.0.0.1:*", device="cuda") as server,
        connect(server.address, home=False) as pool,
    ):
        pool.submit(request).result(60)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            results = pool.submit(request).result(60)
            torch.cuda.synchronize()
    copies = {x.name for x in profiler.events() if x.name.startswith("Memcpy")}
    assert {"Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"} <= copies
    assert not any("Pageable" in name for name in copies)
    assert all(map(torch.equal, results, compute([request], request.q.device)[0]))


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
    """36,864 tokens × 512 heads × 128: the last tokens lie beyond 2**31 elements. They equal the
    same heads alone."""
    n, heads, dim = 36864, 512, 128
    q = torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    layout, window = Layout.contiguous(n, 1), (255, 0)
    everything = attention(q, q, q, layout, causal=True, window_size=window)
    alone = attention(
        *(q[:, -4:].contiguous() for _ in range(3)), layout, causal=True, window_size=window
    )
    for x, y in zip(everything, alone, strict=True):
        assert torch.equal(x[:, -4:], y)


def linear_attention(q, k, v, dout, rate, scale):
    """out, dq, dk, dv of one document, whose heads have one decay, by our kernels."""
    log_decay = torch.full((k.shape[2],), rate, dtype=torch.float64, device=q.device)
    spans, options = spans_of([q.shape[1]]), StateOptions(scale, True, "triton", log_decay)
    out = backend.Forward(Inputs(q, k, v), spans, options).finish(None)
    return out, *backend.Backward(Inputs(q, k, v), dout, spans, options, None).finish(None)


def test_linear_attention_over_a_million_tokens():
    """Sampled rows of a document of 2**20 tokens, decaying to a third in 10,000, against fp64."""
    n, dim, rate = 2**20, 64, -1e-4
    q, k, v, dout = (
        torch.randn(1, n, 1, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    got = linear_attention(q, k, v, dout, rate, dim**-0.5)
    q, k, v, dout = (x[0, :, 0].double() for x in (q, k, v, dout))
    distance = torch.arange(n, dtype=torch.float64, device="cuda")
    for row in (0, 63, 64, n // 3, n - 1):
        before, after = (
            torch.exp(rate * (row - distance[: row + 1])),
            torch.exp(rate * (distance[row:] - row)),
        )
        expected = (
            (before * (k[: row + 1] @ q[row])) @ v[: row + 1],
            (before * (v[: row + 1] @ dout[row])) @ k[: row + 1],
            (after * (dout[row:] @ v[row])) @ q[row:],
            (after * (q[row:] @ k[row])) @ dout[row:],
        )
        for x, y in zip(got, expected, strict=True):
            assert (x[0, row, 0].double() - y * dim**-0.5).norm() <= 2e-2 * (y * dim**-0.5).norm()


def test_linear_attention_indexes_beyond_2_to_the_31():
    """36,864 tokens × 512 heads × 128, as above."""
    x = torch.randn(1, 36864, 512, 128, device="cuda", dtype=torch.bfloat16)
    with arranged(8192, None):
        everything = linear_attention(x, x, x, x, -0.01, 0.1)
        alone = linear_attention(*[x[:, :, -4:].contiguous()] * 4, -0.01, 0.1)
    for y, z in zip(everything, alone, strict=True):
        assert torch.equal(y[:, :, -4:], z)


def test_linear_attention_memory_is_independent_of_tokens():
    def extra(n):
        """What is allocated at most beside operands and results."""
        x = torch.randn(1, n, 4, 64, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = linear_attention(x, x, x, x, -0.01, 0.1)
        return torch.cuda.max_memory_allocated() - before - sum(y.nbytes for y in results)

    extra(2**17)  # what is kept for good
    assert 0 < extra(2**20) <= 1.1 * extra(2**17)


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"
)
@pytest.mark.parametrize("kernels", SANITIZED)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(500)
def test_compute_sanitizer(tool, kernels):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, *SANITIZED[kernels]], check=True, timeout=480)
