"""Say whether something averages a model's gradients over the ranks: DDP, FSDP, or nothing."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.comm.exchange import Comm
from seqpar.torch_private import active_ddp


def averages_gradients(root: nn.Module, comm: Comm) -> bool:
    """Return whether DDP or FSDP averages the gradients of a model that is being called.

    Raise a ValueError if it does so over ranks that do not include all of this group's.
    """
    if isinstance(root, DistributedDataParallel):
        wrapped = [("DDP", dist.get_process_group_ranks(root.process_group))]
    elif (ddp := active_ddp()) is not None:
        wrapped = [("DDP", dist.get_process_group_ranks(ddp.process_group))]
    else:
        wrapped = _sharded(root)
    for name, averaged in wrapped:
        own = comm.processes
        if averaged and not set(own) <= set(averaged):
            found = f"it averages over ranks {averaged}, and the group has {own}"
            raise ValueError(f"{name} must average gradients over all ranks of the group: {found}")
    return bool(wrapped)


def _sharded(root: nn.Module) -> list[tuple[str, list[int]]]:
    """Return the ranks over which FSDP averages the gradients of parameters, as far as they say."""
    wrapped: list[tuple[str, list[int]]] = [
        ("FSDP", dist.get_process_group_ranks(x.process_group))
        for x in root.modules()
        if isinstance(x, FullyShardedDataParallel)
    ]
    if any(isinstance(x, FSDPModule) for x in root.modules()):
        meshes = {x.device_mesh for x in root.parameters() if isinstance(x, DTensor)}
        wrapped += [("FSDP", mesh.mesh.flatten().tolist()) for mesh in meshes] or [("FSDP", [])]
    return wrapped
