"""The modes of tracing end with their blocks."""

import threading

import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.attention.backend import current_backend
from seqpar.comm.messages.comm import Comm
from seqpar.core.hooks import Hooks, hooks, set_hooks
from tests.support.same_bits import torch_threads


def test_nothing_is_recorded_outside_and_modes_end(pool):
    with (
        pytest.raises(KeyError),
        seqpar.trace() as trace,
        set_hooks(skip_messages=True),
        set_hooks(replace_compute=print),
    ):
        raise KeyError
    assert hooks() == Hooks() and trace.events == []


def test_overlapping_traces_end_independently():
    """The trace that began last records."""
    first, second = seqpar.trace(), seqpar.trace()
    first.__enter__()
    two = second.__enter__()
    assert hooks().trace is two
    first.__exit__(None, None, None)
    assert hooks().trace is two
    second.__exit__(None, None, None)
    assert hooks().trace is None
    with seqpar.trace() as outer:
        with seqpar.trace() as inner:
            assert hooks().trace is inner
        assert hooks().trace is outer
    with set_hooks(traces=(outer.events,)):
        with seqpar.trace():
            pass
        assert hooks().trace is outer.events


def attention_of(tokens, **options):
    """Return the output of attention over this number of tokens on one rank, and its inputs."""
    layout = Layout.contiguous(tokens, 1)
    inputs = [torch.randn(tokens, 1, 8, requires_grad=True) for _ in range(3)]
    attn = seqpar.make_attention("ring", Comm("alone", 0, 1), **options)
    return attn(*inputs, layout, causal=False), inputs


def test_a_trace_has_its_threads_calls_alone():
    begun, may_end = threading.Event(), threading.Event()
    areas = []

    def other():
        with seqpar.trace() as trace:
            begun.set()
            assert may_end.wait(60)
            attention_of(3)
        areas.append([event.area for event in trace.events])

    thread = threading.Thread(target=other)
    with seqpar.trace() as trace:
        thread.start()
        assert begun.wait(60)
        attention_of(2)
    may_end.set()
    thread.join()
    assert [event.area for event in trace.events] == [4] and areas == [[9]]


class InADeepBackward(torch.autograd.Function):
    """Its backward runs backwards within backwards, so many that autograd needs another thread, and
    then calls a function there."""

    @staticmethod
    def forward(ctx, x, depth, function):
        ctx.depth, ctx.function = depth, function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            if ctx.depth:
                x = torch.ones(1, requires_grad=True)
                InADeepBackward.apply(x, ctx.depth - 1, ctx.function).backward()
            else:
                ctx.function()
        return gradient, None, None


def test_threads_of_autograd_inherit_trace_and_backend():
    seen = []

    def called():
        seen.append((threading.get_ident(), current_backend("softmax")))
        out, inputs = attention_of(2)
        torch.autograd.grad(out.sum(), inputs)

    out = InADeepBackward.apply(torch.ones(1, requires_grad=True), 100, called)
    with seqpar.trace() as trace, seqpar.use_backend("reference"):
        out.backward()
    ((thread, backend),) = seen
    assert thread != threading.get_ident() and backend == "reference"
    assert [event.what for event in trace.events] == ["ring forward", "ring backward"]


def test_a_trace_has_a_calls_own_threads():
    with torch_threads(2), seqpar.trace() as trace:
        attention_of(40, deterministic="ranks")
    assert sum(event.area for event in trace.events if event.kind == "compute") == 1600


def test_backends_of_threads_are_independent():
    entered, may_end = threading.Event(), threading.Event()
    found = []

    def other():
        found.append(current_backend("softmax"))
        with seqpar.use_backend("aten"):
            entered.set()
            assert may_end.wait(60)
            found.append(current_backend("softmax"))

    thread = threading.Thread(target=other)
    with seqpar.use_backend("reference"):
        thread.start()
        assert entered.wait(60)
        assert current_backend("softmax") == "reference"
    assert current_backend("softmax") == "default"
    may_end.set()
    thread.join()
    assert found == ["default", "aten"] and current_backend("softmax") == "default"
