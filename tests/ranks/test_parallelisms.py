"""Sequence parallelism beside others on one mesh: gradients of the example are one process's."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import seqpar
from tests.support.cases import STRATEGIES
from tests.support.examples import example
from tests.support.ranks import device_mesh
from tests.support.tiers import few_rows


def error(group, kind, strategy):
    return example("parallelisms").largest_error(kind, strategy)


KINDS = ["ddp", "fsdp", "tp", "pipeline"]


@pytest.mark.composes(
    "PyTorch",
    "DDP averages over all ranks: multiply the loss by their number",
    case="ddp",
    data=2,
    context=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "FSDP2 on `mesh['dp', 'sp']`: multiply the loss by the number of its ranks",
    case="fsdp",
    data=2,
    context=2,
    FSDP=4,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "first `ColwiseParallel(use_local_output=False)` for q, k and v, then FSDP2 over context",
    case="tp",
    context=2,
    tensor=2,
    FSDP=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "each stage has the layout; sum gradients over context",
    case="pipeline",
    pipeline=2,
    context=2,
    equal="gradients",
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(pool, kind):
    assert max(pool(4, error, kind, "ring")) <= 1e-6


@pytest.mark.composes(
    "PyTorch",
    "the same, with every other strategy of softmax attention",
    case="tp",
    context=2,
    tensor=2,
    FSDP=2,
    equal="gradients",
)
@pytest.mark.composes(
    "PyTorch",
    "the same, with every other strategy of softmax attention",
    case="pipeline",
    pipeline=2,
    context=2,
    equal="gradients",
)
@pytest.mark.exhaustive
@few_rows(pairs=False)
@pytest.mark.parametrize("strategy", [x for x in STRATEGIES if x not in ("mesh", "ring", "usp")])
@pytest.mark.parametrize("kind", ["tp", "pipeline"])
def test_every_strategy_has_them(pool, kind, strategy):
    assert max(pool(4, error, kind, strategy)) <= 1e-6


def test_the_kinds_are_the_examples():
    assert set(KINDS) == set(example("parallelisms").KINDS)


def saved(group, folder):
    """Save a model that is sharded over four ranks."""
    kinds = example("parallelisms")
    mesh = device_mesh(2, 2, 1, names=("dp", "sp", "tp"))
    model = kinds.sharded_model(mesh)
    checkpoints.save(get_model_state_dict(model), checkpoint_id=folder)


def loaded(group, folder):
    """Load it on two ranks, twice, into a model of other values; return the loss of both."""
    kinds = example("parallelisms")
    mesh = device_mesh(2, 2, names=("pairs", "sp"))["sp"]
    model = kinds.Model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fully_shard(model, mesh=mesh)
    state = get_model_state_dict(model)
    checkpoints.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    set_model_state_dict(model, state)
    attn = seqpar.make_attention("ring", mesh)
    layout = seqpar.Layout.zigzag(kinds.CU_SEQLENS, 2)
    loss = kinds.local_loss(model.on(attn, layout), slice(None), attn, layout).detach()
    dist.all_reduce(loss, group=mesh.get_group())
    return float(loss)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is, for the one process
def test_a_checkpoint_of_four_ranks_loads_on_fewer(pool):
    kinds = example("parallelisms")
    with tempfile.TemporaryDirectory() as folder:
        pool(4, saved, folder)
        on_two = pool(4, loaded, folder)
        model = kinds.Model()
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        state = {name: torch.zeros_like(x) for name, x in expected.items()}
        checkpoints.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(state[name], x) for name, x in expected.items())
    assert len(set(on_two)) == 1
    assert abs(on_two[0] - float(kinds.one_process()[0].detach())) <= 1e-5


def on_a_slice(group):
    """How far USP, on a slice of two dimensions of a mesh of three, is from one process."""
    mesh = device_mesh(1, 2, 2, names=("dp", "nodes", "gpus"))
    attn = seqpar.USPAttention(mesh["nodes", "gpus"])
    layout, alone = seqpar.Layout.zigzag([0, 9, 40], 4), seqpar.Layout.zigzag([0, 9, 40], 1)
    q = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(0))
    out = attn(*[layout.shard(q, attn.rank)] * 3, layout, causal=True)
    one = device_mesh(4, 1, names=("all", "one"))["one"]
    whole = seqpar.RingAttention(one)(q, q, q, alone, causal=True)
    return float((out - layout.shard(whole, attn.rank)).abs().max())


def test_two_dimensions_of_a_mesh_are_taken(pool):
    assert max(pool(4, on_a_slice)) <= 1e-6
