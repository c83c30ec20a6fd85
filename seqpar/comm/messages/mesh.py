"""The process group of all ranks of a mesh."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from seqpar.core.torch_private import flat_mesh


def group_of_mesh(mesh: DeviceMesh) -> tuple[ProcessGroup, tuple[int, ...]]:
    """Return the group of all ranks of a mesh, and the rank in it of each rank along its rows.

    torch sorts a group's ranks, whatever their order in the mesh.
    """
    ranks, world = mesh.mesh.flatten().tolist(), dist.group.WORLD
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must have this process (global rank {dist.get_rank()}), got {mesh}")
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif world is not None and sorted(ranks) == dist.get_process_group_ranks(world):
        group = world
    elif mesh.mesh_dim_names is None:
        reason = "to make a group of some of the ranks"
        raise ValueError(f"mesh must have mesh_dim_names {reason}, got {mesh}")
    else:
        group = flat_mesh(mesh).get_group()
    in_group = dist.get_process_group_ranks(group)
    return group, tuple(map(in_group.index, ranks))
