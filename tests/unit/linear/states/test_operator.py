"""The operator of linear attention: opcheck, autocast and checkpointing."""

import pytest
import torch

import seqpar
from seqpar import LASP2Attention, Layout
from seqpar.comm.messages.comm import Comm
from tests.support.linear_cases import LinearCase
from tests.support.ranks import virtual


@pytest.mark.parametrize("begun", [False, True])
def test_operators_pass_opcheck(begun):
    lin, case = (
        LASP2Attention(Comm("one", 0, 1)),
        LinearCase(Layout.zigzag([0, 5, 12], 1), begun=begun),
    )
    q, k, v, _, initial, _ = case.inputs()
    options = {"log_decay": case.log_decay, "initial_state": initial, "return_state": True}
    tensors, arguments, _ = lin._operator_inputs(q, k, v, case.layout, **options)
    tensors = [x if x is None else x.detach().requires_grad_(i != 3) for i, x in enumerate(tensors)]
    torch.library.opcheck(torch.ops.seqpar.linear_attention, (*tensors, *arguments))


def test_autocast_and_checkpointing():
    layout = Layout.contiguous([0, 40, 90], 1)
    comm = Comm("one", 0, 1)
    lin = LASP2Attention(comm)
    q, k, v = (t.float().requires_grad_() for t in LinearCase(layout).inputs()[:3])
    with torch.autocast("cpu", torch.bfloat16):
        assert lin(q, k, v, layout).dtype == torch.bfloat16
    plain = lin(q.sin(), k, v, layout).square().sum()
    kept = seqpar.checkpoint(lambda q: lin(q.sin(), k, v, layout), q).square().sum()
    with seqpar.trace() as trace:
        gradients = [torch.autograd.grad(loss, (q, k, v)) for loss in (plain, kept)]
    assert {event.what for event in trace.events} == {"lasp2 backward"}  # and no forward again
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_calls_run_under_inference_mode(transport):
    layout = Layout.zigzag([0, 37, 90], 2)

    def call(comm):
        with torch.inference_mode():
            q, k, v = (layout.shard(x, comm.rank) for x in LinearCase(layout).inputs()[:3])
            return LASP2Attention(comm, transport=transport)(q, k, v, layout)

    def call_for_training(comm):
        q, k, v = (layout.shard(x, comm.rank) for x in LinearCase(layout).inputs()[:3])
        return LASP2Attention(comm, transport=transport)(q, k, v, layout)

    for x, y in zip(virtual(2, call), virtual(2, call_for_training), strict=True):
        assert x.equal(y)
