"""The operators of short convolutions: rules for tracing, what is kept, and what hosts wait for."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seqpar import Layout, causal_conv1d, token_shift
from seqpar.comm.messages.comm import Comm
from seqpar.halo.functions import halo_on, room_of
from seqpar.halo.halo_operator import CONVOLUTION, ConvolutionArguments
from tests.support.convolutions import ConvCase, run
from tests.support.garbage import left_by
from tests.support.ranks import virtual
from tests.support.steady import RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

LAYOUTS = layouts(stripe=1)


def forward_and_backward(comm, layout, width, activation):
    """One on meta tensors, which no data travels for."""
    shape = 2, layout.tokens_on(comm.rank), 8
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight, bias = (torch.empty(8, *n, device="meta", requires_grad=True) for n in ((width,), ()))
    bound = halo_on(comm)
    arguments = ConvolutionArguments(
        layout._handle, room_of(layout, comm.rank, width - 1), bound.key, width - 1, activation
    )
    with torch.no_grad():
        out, numbers, received = CONVOLUTION._forward(x, weight, bias, *arguments)
        saved = [x, weight, bias, received]
        CONVOLUTION._backward(out, saved, [True] * 4, [], numbers, *arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_for_nothing(layout):
    """From a layout's second call on: no table is uploaded, and no number read back."""
    for rank, activation in itertools.product(range(RANKS), ("", "silu")):
        comm, second = SilentComm(rank, RANKS), HostWaits()
        forward_and_backward(comm, LAYOUTS[layout], 4, activation)
        with second:
            forward_and_backward(comm, LAYOUTS[layout], 4, activation)
        assert not second.found, (rank, activation)


def test_a_pass_copies_its_tables_at_once():
    layout = Layout.zigzag([0, 161, 640], RANKS, min_chunk=2)  # which no other test has called
    first = HostWaits()
    with first:
        forward_and_backward(SilentComm(1, RANKS), layout, 4, "silu")
    assert first.found == {"aten._to_copy.default": 2}  # of forward and of backward


@pytest.mark.parametrize("ranks", [1, 2])
def test_rules_for_tracing(ranks):
    """Shapes, dtypes and strides that the fake rules infer are those of results."""
    layout, comm = Layout.striped([0, 3, 20], ranks, stripe=2), SilentComm(0, ranks)
    bound, x = halo_on(comm), torch.randn(2, layout.tokens_on(0), 3)
    arguments = ConvolutionArguments(layout._handle, room_of(layout, 0, 3), bound.key, 3, "silu")
    for given in ((torch.randn(3, 4), torch.randn(3)), (torch.randn(3, 4), None)):
        torch.library.opcheck(
            torch.ops.seqpar.causal_conv1d.default,
            (x.transpose(0, 1).contiguous().transpose(0, 1), *given, *arguments),
            test_utils="test_faketensor",
        )


@few_rows()
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("taps", ["weight and bias", "weight", "none"])
def test_operators_pass_opcheck(taps, activation):
    if taps == "none" and activation:
        return  # a token shift has no activation
    layout, comm = Layout.zigzag([0, 5, 12], 1), Comm("alone", 0, 1)
    bound, x = halo_on(comm), torch.randn(2, 12, 3, requires_grad=True)
    width = 2 if taps == "none" else 4
    weight = None if taps == "none" else torch.randn(3, width, requires_grad=True)
    bias = torch.randn(3, requires_grad=True) if "bias" in taps else None
    room = room_of(layout, 0, width - 1)
    arguments = ConvolutionArguments(layout._handle, room, bound.key, width - 1, activation)
    torch.library.opcheck(torch.ops.seqpar.causal_conv1d, (x, weight, bias, *arguments))


def test_nothing_is_in_a_reference_cycle():
    case = ConvCase(Layout.zigzag([0, 40, 90], 2))
    types = [type(x) for x in left_by(virtual, 2, run, case)]
    assert not any(issubclass(left, torch.Tensor) for left in types)
    assert not any(left.__module__.startswith("seqpar") for left in types)


def test_flops_are_those_of_a_depthwise_convolution():
    x, weight = torch.randn(24, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    layout, comm = Layout.contiguous(24, 1), Comm("alone", 0, 1)
    halo_on(comm)  # a counter knows the operators from before it was made
    with FlopCounterMode(display=False) as counter:
        causal_conv1d(x, weight, layout, comm).sum().backward()
        token_shift(x, layout, comm)
    assert counter.get_total_flops() == 3 * 2 * 24 * 3 * 4


def test_autocast_casts_x_and_keeps_the_taps():
    x, weight = torch.randn(24, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    layout, comm = Layout.contiguous(24, 1), Comm("alone", 0, 1)
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_conv1d(x, weight, layout, comm)
    assert out.dtype == torch.bfloat16
    expected = causal_conv1d(x.bfloat16(), weight, layout, comm)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
