"""What works on real groups and meshes: unshard and its backward, and modules of a device mesh."""

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import Layout
from tests.support.calls import local


def unsharded(group, dim):
    layout, rank = (
        Layout.striped([0, 5, 17], dist.get_world_size(group), stripe=2),
        dist.get_rank(group),
    )
    x = torch.arange(17.0 * 3).reshape(17, 3)
    x = x.movedim(0, dim)
    part = layout.shard(x, rank, dim).requires_grad_()
    whole = layout.unshard(part, group, dim)
    weights = torch.arange(17.0).reshape([17 if i == dim % 2 else 1 for i in range(2)]) * (rank + 1)
    (whole * weights).sum().backward()
    expected = layout.shard(weights.expand_as(x) / (rank + 1), rank, dim) * 10  # 1 + 2 + 3 + 4
    return torch.equal(whole, x) and torch.equal(part.grad, expected)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_restores_the_pack_and_sums_gradients(pool, dim):
    assert all(pool(4, unsharded, dim))


def on_a_mesh(group):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    layout = Layout.zigzag(10, 2)
    rank = dist.get_rank(group)
    out = seqpar.RingAttention(mesh)(*local(layout, rank), layout, causal=True)
    return torch.equal(out, seqpar.RingAttention(group)(*local(layout, rank), layout, causal=True))


def test_a_device_mesh_is_a_group(pool):
    assert pool(2, on_a_mesh) == [True, True]


def with_a_group_of_its_own(group):
    dist.new_group([0, 1])


def test_groups_of_some_processes_are_noticed(pool):
    """After such a call, the next group of all four processes would never be complete."""
    with pytest.raises(AssertionError, match=r"with_a_group_of_its_own .* all processes"):
        pool(2, with_a_group_of_its_own)
    assert pool(4, with_a_group_of_its_own) == [None] * 4
