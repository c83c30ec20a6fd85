"""What short convolutions refuse, by name, before anything is sent."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from seqpar import Layout, causal_conv1d, token_shift
from seqpar.comm.messages.comm import Comm
from tests.support.fakes import fake_group
from tests.support.ranks import virtual

LAYOUT = Layout.zigzag([0, 10, 24], 2)
REFUSALS = [
    ({"x": torch.zeros(11, 3)}, r"x must have the 12 tokens its layout gives this rank, got 11"),
    ({"x": torch.zeros(1, 1, 12, 3)}, r"x must be \(T, C\) or \(B, T, C\), with channels, got"),
    ({"x": torch.zeros(12, 0)}, r"x must be \(T, C\) or \(B, T, C\), with channels, got \(12, 0\)"),
    ({"x": torch.zeros(12, 3).long()}, "x must be of one of .* got torch.int64"),
    ({"x": 3}, "x must be a tensor, got int"),
    ({"x": torch.zeros(12, 3).to_sparse()}, "x must be a dense tensor"),
    ({"weight": torch.zeros(4, 3)}, r"weight must be \(3, 3\) of torch.float32, got \(4, 3\)"),
    ({"weight": torch.zeros(3, 1, 4)}, r"weight must be \(C, w\), with w at least 1, got"),
    ({"weight": torch.zeros(3, 0)}, r"weight must be \(C, w\), with w at least 1, got \(3, 0\)"),
    ({"weight": torch.zeros(3, 4).bfloat16()}, "weight must be .* of torch.float32, got"),
    ({"weight": torch.zeros(3, 4, device="meta")}, "weight must be on x's device, cpu, got meta"),
    ({"weight": None}, "weight must be a tensor, got NoneType"),
    ({"bias": torch.zeros(4)}, r"bias must be \(3,\) of torch.float32, got \(4,\)"),
    ({"bias": torch.zeros(3).double()}, "bias must be .* got .* of torch.float64"),
    ({"bias": 0}, "bias must be a tensor, got int"),
    ({"activation": "gelu"}, "activation must be None, 'silu' or 'swish', got 'gelu'"),
    ({"activation": ["silu"]}, "activation must be None, 'silu' or 'swish', got"),
    ({"layout": 5}, "layout must be a seqpar.Layout, got int"),
    ({"layout": Layout.zigzag(36, 3)}, "layout must be for the group's 2 ranks, got one for 3"),
    ({"group": "ranks"}, "group must be a process group .* or a mesh, got 'ranks'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_name_the_argument_and_send_nothing(change, message):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    call = {"x": torch.zeros(12, 3), "weight": torch.zeros(3, 4), "layout": LAYOUT, "group": comm}
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**call | change)
    if "weight" not in call | change or change.keys() <= {"x", "layout", "group"}:
        del call["weight"]
        with pytest.raises(ValueError, match=message):
            token_shift(**call | change)


def test_without_data_it_is_checked_too():
    comm, weight = Comm("silent", 0, 2), torch.zeros(3, 4, device="meta")
    out = causal_conv1d(torch.zeros(12, 3, device="meta"), weight, LAYOUT, comm)
    assert out.is_meta and out.shape == (12, 3)
    with pytest.raises(ValueError, match="x must have the 12 tokens"):
        causal_conv1d(torch.zeros(11, 3, device="meta"), weight, LAYOUT, comm)


def test_dtensors_are_refused():
    with fake_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.zeros(12, 3), mesh, [Shard(1)])
        with pytest.raises(ValueError, match=r"x must not be a DTensor: .* to_local"):
            causal_conv1d(x, torch.zeros(3, 4), LAYOUT, Comm("silent", 0, 2))


# torch's own, the first time that it makes a forward-mode derivative
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
def test_tangents_and_second_derivatives_are_refused():
    x, weight = torch.randn(24, 3, requires_grad=True), torch.randn(3, 4)
    layout, comm = Layout.contiguous(24, 1), Comm("alone", 0, 1)

    def convolved(x):
        return causal_conv1d(x, weight, layout, comm, activation="silu")

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match="x must not have a tangent"):
            convolved(dual)
    with pytest.raises(NotImplementedError, match=r"torch.func"):
        torch.func.vmap(convolved)(x[None].detach())
    (dx,) = torch.autograd.grad(convolved(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.sum().backward()


def checked(comm, changes):
    """A call in which ranks may differ, and the same on all: the error of the first, if any."""
    call = {"weight": torch.zeros(3, 2)} | changes[comm.rank]
    x = LAYOUT.shard(torch.zeros(24, 3), comm.rank)
    function = causal_conv1d if call["weight"] is not None else token_shift
    error = None
    try:
        function(x, layout=LAYOUT, group=comm, check_ranks=True, **drop_none(call))
    except ValueError as fault:
        error = str(fault)
    token_shift(x, LAYOUT, comm, check_ranks=True)  # the group still works
    return error


def drop_none(call):
    return {name: x for name, x in call.items() if x is not None}


DISAGREEMENTS = [
    ({"weight": None}, "weight must be the same on all ranks: rank 0 has True, rank 1 has False"),
    ({"bias": torch.zeros(3)}, "bias must be the same on all ranks: rank 0 has False, rank 1 has"),
    ({"activation": "silu"}, "activation must be the same on all ranks: rank 0 has , rank 1 has"),
    ({"activation": "gelu"}, r"activation must be None, .* got 'gelu' \(rank 1 of 2\)"),
    ({"weight": torch.zeros(4, 2)}, r"weight must be \(3, 2\) .* got \(4, 2\) .* \(rank 1 of 2\)"),
]


@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS, ids=[x for _, x in DISAGREEMENTS])
def test_ranks_that_disagree_all_raise_the_same_error(change, message):
    first, second = virtual(2, checked, [{}, change])
    assert first == second
    assert re.search(message, first)
