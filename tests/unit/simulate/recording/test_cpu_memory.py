"""The simulated memory of ranks on CPUs, compared with the memory that torch allocates."""

from itertools import accumulate
from threading import Event, Thread

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from seqpar import Layout, make_attention, simulate
from seqpar.core.torch_private import cpu_attention, cpu_attention_backward
from seqpar.simulate.recording.operators import Operations
from seqpar.softmax.backends.aten import backward_buffer_bytes, forward_buffer_bytes
from tests.support.same_bits import torch_threads


def allocated(function):
    """The most bytes that torch's allocator for CPUs holds during the function, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    sizes, waiting = [], [*profiled.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes.sort(key=lambda x: x[0])
    return max(accumulate((size for _, size in sizes), initial=0)), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys"), [(1000, 2000), (300, 100), (20, 700)])
@pytest.mark.parametrize("by_token", [True, False])
def test_the_kernels_buffers_have_the_declared_size(dtype, rows, keys, by_token):
    shapes = [(2, n, 4, 64) if by_token else (2, 4, n, 64) for n in (rows, keys, keys)]
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    if by_token:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dout = torch.ones_like(q)
    with torch_threads(1):
        forward, results = allocated(lambda: cpu_attention()(q, k, v))
        backward, gradients = allocated(
            lambda: cpu_attention_backward()(dout, q, k, v, *results, 0.0, False)
        )
    declared = forward_buffer_bytes(q, k), backward_buffer_bytes(dout, q, k)
    found = forward - sum(x.nbytes for x in results), backward - sum(x.nbytes for x in gradients)
    # Products in half precision also have buffers of oneDNN's, which are not declared.
    others = 2**18 if dtype == torch.bfloat16 else 0
    assert all(0 <= theirs - mine <= others for mine, theirs in zip(declared, found, strict=True))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_operands_of_two_dtypes_are_counted_with_their_copies(dtypes):
    def step(device):
        x, y = (torch.ones(2**16, dtype=dtype, device=device) for dtype in dtypes)
        x.add_(y, alpha=2)
        return torch.sub(x, y)

    (program,) = simulate.record(lambda comm: step("meta"), 1, ordered=False)
    peak, _ = allocated(lambda: step("cpu"))
    assert program.peak_bytes == peak


CALLS = {
    "fp32": (torch.float32, 4, {}),
    "bf16": (torch.bfloat16, 4, {}),
    "GQA in bf16": (torch.bfloat16, 1, {}),
    "window": (torch.float32, 2, {"window_size": (300, -1)}),
    "softcap": (torch.float32, 2, {"softcap": 20.0}),
}


@pytest.mark.parametrize(("dtype", "kv_heads", "options"), CALLS.values(), ids=CALLS)
def test_the_peak_of_a_rank_is_what_torch_allocates(dtype, kv_heads, options):
    layout = Layout.contiguous([0, 500, 2500], 1)

    def step(comm, device):
        q, k, v = (
            torch.ones(2500, heads, 64, dtype=dtype, device=device).mul_(0.1).requires_grad_()
            for heads in (4, kv_heads, kv_heads)
        )
        out = make_attention("ring", comm)(q, k, v, layout, causal=True, **options)
        out.backward(torch.ones_like(out))

    (program,) = simulate.record(lambda comm: step(comm, "meta"), 1, ordered=False)
    real = lambda: step(simulate.Comm("alone", 0, 1), "cpu")  # noqa: E731
    with torch_threads(1):
        real()  # keeps what depends only on the layout
        peak, _ = allocated(real)
    assert program.peak_bytes == pytest.approx(peak, rel=0.02)


def test_a_message_is_held_until_its_exchange_has_ended():
    def step(comm):
        message = torch.empty(1000, device="meta")
        pending = comm.exchange([(1 - comm.rank, message)], [], label="message")
        del message
        other = torch.empty(1000, device="meta")
        pending.wait()
        return other, torch.empty(1000, device="meta")

    for ordered in (True, False):
        program = simulate.record(step, 2, only=[0], ordered=ordered)[0]
        assert program.peak_bytes == 2 * 4000


def test_a_thread_that_ends_later_does_not_stop_the_count_of_operators():
    """Threads that compute tiles inherit the hooks of a recording."""
    operations, entered, leave = Operations(lambda action: None, True, True), Event(), Event()

    def compute_a_tile():
        with operations.memory_only():
            entered.set()
            leave.wait(10)

    thread = Thread(target=compute_a_tile)
    with operations.memory_only():
        thread.start()
        assert entered.wait(10)
    leave.set()
    thread.join()
    assert operations._costs
