"""The operator of recurrent attention: opcheck, autocast, checkpointing; and what calls keep."""

import pytest
import torch

import seqpar
from seqpar import Layout, RecurrentAttention
from seqpar.comm.messages.comm import Comm
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support.garbage import left_by
from tests.support.ranks import virtual
from tests.support.recurrent_calls import NAMES, RecurrentCall, begin


def tensors_of(call):
    """The inputs of a call by name, without a batch dimension, and the initial states."""
    inputs, _, entering, _ = call.case.tensors()
    named = dict(zip(NAMES, inputs, strict=True))
    return {name: x[0] for name, x in named.items() if x is not None}, entering[:, 0]


@pytest.mark.parametrize(
    ("kind", "begun", "heads_first"),
    [
        ("gated_delta", True, True),
        pytest.param("vector_decay", False, True, marks=pytest.mark.exhaustive),
        pytest.param("delta", False, False, marks=pytest.mark.exhaustive),
    ],
)
def test_operators_pass_opcheck(kind, begun, heads_first):
    call = RecurrentCall(kind, Layout.zigzag([0, 5, 12], 1), begun=begun, batched=False)
    rec = RecurrentAttention(Comm("one", 0, 1), kind)
    named, initial = tensors_of(call)
    options = {"initial_state": initial if begun else None, "return_state": True}
    tensors, arguments, _ = rec._operator_inputs(**named, layout=call.layout, **options)
    tensors = [None if x is None else x.detach() for x in tensors]
    if heads_first:  # in memory
        first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
        tensors = [None if x is None else first(x) for x in tensors]
    tensors = [None if x is None else x.requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.seqpar.linear_attention, (*tensors, *arguments))


def test_autocast_and_checkpointing():
    layout = Layout.contiguous([0, 40, 90], 1)
    rec = RecurrentAttention(Comm("one", 0, 1), "gated_delta")
    named, _ = tensors_of(RecurrentCall("gated_delta", layout, batched=False))
    named = {name: x.float().requires_grad_() for name, x in named.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert rec(**named, layout=layout).dtype == torch.bfloat16
    q = named.pop("q")
    plain = rec(q.sin(), **named, layout=layout).square().sum()
    kept = seqpar.checkpoint(lambda q: rec(q.sin(), **named, layout=layout), q).square().sum()
    wanted = (q, *named.values())
    with seqpar.trace() as trace:
        gradients = [torch.autograd.grad(loss, wanted) for loss in (plain, kept)]
    assert {event.what for event in trace.events} == {"recurrent backward"}  # no forward again
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_run_under_inference_mode(transport):
    layout = Layout.zigzag([0, 37, 90], 2)
    call = RecurrentCall("gated_delta", layout, transport, batched=False)

    def infer(comm):
        with torch.inference_mode():
            named = {name: layout.shard(x, comm.rank) for name, x in tensors_of(call)[0].items()}
            return RecurrentAttention(comm, call.kind, transport)(
                **named, layout=layout, scale=call.case.scale
            )

    def train(comm):
        return begin(comm, call)[0]["out"][0]

    for x, y in zip(virtual(2, infer), virtual(2, train), strict=True):
        assert x.equal(y)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_in_a_reference_cycle(transport):
    """Neither operands, maps and gradients, nor tables."""

    def once(comm):
        layout = Layout.zigzag([0, 37, 90], 2)
        call = RecurrentCall("gated_delta", layout, transport, begun=True, returned=True)
        outputs, _ = begin(comm, call)
        torch.autograd.backward(*zip(*outputs.values(), strict=True))

    types = [type(x) for x in left_by(virtual, 2, once)]
    assert not any(issubclass(left, torch.Tensor) for left in types)
    assert not any(left.__module__.startswith("seqpar") for left in types)
