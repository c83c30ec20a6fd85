"""Which DTensors attention takes, on a fake group of 4 ranks: refusals name the argument."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from seqpar import LASP2Attention, Layout, RingAttention
from tests.support.fakes import fake_group

LAYOUT = Layout.zigzag([0, 10, 24], 2)
HEADS = {"q": (12, 2, 8), "k": (12, 2, 8), "v": (12, 2, 8), "sinks": (2,), "log_decay": (2,)}
SHAPES = {"initial_state": (2, 2, 8, 8), "scale": (2,), **HEADS}
DIMS = {"q": 1, "k": 1, "v": 1, "sinks": 0, "log_decay": 0, "initial_state": 1, "scale": 0}


@pytest.fixture
def mesh():
    """Tokens over dimension 0, heads over dimension 1."""
    with fake_group(0, 4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads"))


def placed(mesh, name, *placements, shape=None):
    x = -torch.ones(shape or SHAPES[name])
    return DTensor.from_local(x, mesh, placements or [Shard(DIMS[name])], run_check=False)


REFUSALS = [
    ("q", lambda mesh: placed(mesh, "q", Shard(0)), r"q must have placements \(Shard\(dim=1\),\)"),
    ("q", lambda mesh: placed(mesh, "q", Shard(2)), "q must have placements .*its heads, dim -2"),
    ("q", lambda mesh: placed(mesh, "q", Partial()), "q must have placements"),
    ("q", lambda mesh: torch.ones(12, 2, 8), "k must be a plain tensor, like q, got a DTensor"),
    ("k", lambda mesh: torch.ones(12, 2, 8), "k must be a DTensor like q"),
    ("k", lambda mesh: placed(mesh, "k", Replicate()), "k must have placements"),
    ("v", lambda mesh: placed(mesh, "v", Shard(0)), "v must have placements"),
    ("sinks", lambda mesh: torch.ones(2), "sinks must be a DTensor like q"),
    ("sinks", lambda mesh: placed(mesh, "sinks", Replicate()), "sinks must have placements"),
    (
        "softmax_scale",
        lambda mesh: torch.ones((), requires_grad=True),
        "softmax_scale must have heads",
    ),
]


@pytest.mark.composes(
    "PyTorch",
    "DTensors may be sharded over heads, not over tokens: the layout divides the tokens",
    context=2,
    tensor=2,
    refused="q must have placements",
)
@pytest.mark.parametrize(("name", "value", "message"), REFUSALS, ids=[x[2] for x in REFUSALS])
def test_other_placements_are_refused(mesh, name, value, message):
    attn = RingAttention(mesh["tokens"])
    call = {x: placed(mesh["heads"], x) for x in "qkv"} | {"layout": LAYOUT, "causal": True}
    assert attn.unsupported(**call, softmax_scale=torch.tensor(0.5)) is None
    call[name] = value(mesh["heads"])
    with pytest.raises(ValueError, match=message):
        attn(**call)
    assert attn.unsupported(**call) is not None and not attn.sent_bytes


def test_heads_must_be_divided_evenly(mesh):
    attn = RingAttention(mesh["tokens"])
    q = DTensor.from_local(
        torch.ones(12, 2, 8), mesh["heads"], [Shard(1)], run_check=False,
        shape=torch.Size((12, 3, 8)), stride=(24, 8, 1),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="q must have a number of heads that is a multiple of the mesh's 2 ranks"
    ):
        attn(q, q, q, LAYOUT, causal=True)


def test_linear_attention_too(mesh):
    lin = LASP2Attention(mesh["tokens"])
    names = "q", "k", "v", "log_decay", "initial_state", "scale"
    call = {x: placed(mesh["heads"], x) for x in names} | {"layout": LAYOUT, "causal": True}
    assert lin.unsupported(**call) is None
    for name in ("log_decay", "initial_state", "scale"):
        with pytest.raises(ValueError, match=f"{name} must be a DTensor like q"):
            lin(**call | {name: torch.zeros(SHAPES[name])})
