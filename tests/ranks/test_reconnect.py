"""Modules that are saved and loaded: on their group, on an equal one elsewhere, and without one."""

import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar import Layout
from tests.support.calls import local
from tests.support.plans import at_keys

LAYOUT = Layout.zigzag([0, 10, 24], 2)
MODULES = {
    "ulysses": lambda group: seqpar.UlyssesAttention(group, True, head_groups=1),
    "token_ring": lambda group: seqpar.TokenRingAttention(group, partial_dtype=torch.bfloat16),
    "disaggregated": lambda group: seqpar.DisaggregatedAttention(group, plan=at_keys),
    "lasp2": lambda group: seqpar.LASP2Attention(group, "scan", blocks=2),
}


def saved(group, name):
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(MODULES[name](group)), file)
    return file.getvalue()


def loaded(group, data, name):
    """Load a module; whether it computes what one made here does, and is on the same group."""
    module = torch.load(io.BytesIO(data), weights_only=False)[0]
    made = MODULES[name](group)
    assert module._bound is made._bound and repr(module) == repr(made)
    q, k, v = local(LAYOUT, module.rank)
    options = {} if name == "lasp2" else {"causal": True}
    return torch.equal(module(q, k, v, LAYOUT, **options), made(q, k, v, LAYOUT, **options))


def refusal(data):
    try:
        return repr(torch.load(io.BytesIO(data), weights_only=False))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_finds_its_group_in_every_process(pool, name):
    data, _ = pool(2, saved, name)
    assert pool(2, loaded, data, name) == [True, True]  # rank 1 loads what rank 0 has saved
    assert "but torch.distributed is not initialised" in refusal(data)


def on_meshes(group):
    """Save and load modules of meshes, and of the default group, on all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    made = [
        seqpar.USPAttention(mesh, "all_gather"),
        seqpar.RingAttention(mesh["gpu"]),
        seqpar.RingAttention(dist.group.WORLD),
    ]
    copies = [pickle.loads(pickle.dumps(module)) for module in made]
    return [copied._bound is module._bound for copied, module in zip(copies, made, strict=True)]


def test_modules_of_meshes_find_them(pool):
    assert pool(4, on_meshes) == [[True] * 3] * 4


MISSING = [0, 1, 3]  # no other group of the pool has these ranks


def of_missing_group(group):
    """Save a module, and load it when its group has been destroyed."""
    made = dist.new_group(MISSING)
    if dist.get_rank() not in MISSING:
        return None
    module = seqpar.RingAttention(made)
    file = io.BytesIO()
    torch.save(module, file)
    del module
    dist.destroy_process_group(made)
    return refusal(file.getvalue())


def test_a_missing_group_is_named(pool):
    messages = pool(4, of_missing_group)
    known = "this process has groups of ranks [0, 1, 2, 3]"
    for message in (messages[rank] for rank in MISSING):
        assert "needs the process group '" in message
        assert f"of the global ranks {MISSING}, but {known}" in message


def test_a_module_without_a_group_cannot_be_saved():
    attn = seqpar.RingAttention(seqpar.comm.messages.comm.Comm("silent", 0, 2))
    with pytest.raises(RuntimeError, match="the process group 'silent' has been destroyed"):
        pickle.dumps(attn)
