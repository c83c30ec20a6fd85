"""Find the group of a module that was unpickled, by the group's name and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from seqpar.comm.messages.exchange import Comm
from seqpar.core.torch_private import process_groups


class Address(NamedTuple):
    """A description of a group that can be pickled instead of the group.

    Attributes:
        name: the process group's name, which depends on the order in which groups were made.
        ranks: the global rank of each of its ranks.
        order: the rank in the process group of each of the Comm's ranks.
        shape: the shape of the Comm: a mesh's shape, or (ranks,).
        world: whether the group is the default group.
    """

    name: str
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    world: bool


def address_of(comm: Comm) -> Address:
    """Return the address of a Comm's group; raise a RuntimeError for a destroyed group."""
    group = comm.process_group
    ranks = tuple(dist.get_process_group_ranks(group))
    order = tuple(comm._order)
    return Address(group.group_name, ranks, order, comm.shape, group is dist.group.WORLD)


def reconnect(address: Address) -> Comm:
    """Return the Comm of this process's group that has this address.

    The address of the default group gives this process's default group, even of another size unless
    it was a mesh. Other addresses give the group of this name and these ranks, or the first group
    with these ranks. A RuntimeError names the missing group.
    """
    name, ranks, order, shape, world = address
    if not dist.is_initialized():
        raise RuntimeError(f"{_described(address)}, but torch.distributed is not initialised here")
    known = {group: tuple(dist.get_process_group_ranks(group)) for group in process_groups()}
    groups = [group for group, found in known.items() if found == ranks]
    named = [group for group in groups if group.group_name == name]
    default = dist.group.WORLD
    if world and default is not None and len(shape) == 1 and order == tuple(range(len(ranks))):
        return Comm.of(default)
    if world and default in groups:
        named = [default]
    if not groups:
        listed = ", ".join(str(list(found)) for found in known.values())
        raise RuntimeError(f"{_described(address)}; those of this process are of ranks {listed}")
    return Comm._of((named or groups)[0], order, shape)


def _described(address: Address) -> str:
    kind = f"a mesh of shape {address.shape}" if len(address.shape) > 1 else "a group"
    called = "the default group" if address.world else f"the process group {address.name!r}"
    ranks = list(address.ranks)
    return f"the module is on {kind}, and to load it needs {called} of the global ranks {ranks}"
