"""`BoundStrategy`: a strategy together with a group of ranks, which operators find by a string.

Operators of torch can carry a string but no Python object. If a strategy is unpickled in another
process, it finds its group again by the group's name and ranks.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from seqpar.comm.agreement import C, Described, attempt, compare_calls
from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.routing.relays import Relays
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import shown
from seqpar.core.hooks import hooks
from seqpar.core.torch_private import process_groups


class Named(Protocol):
    """The interface of a strategy: a name, and a `str()` that contains all of its options."""

    name: ClassVar[str]
    routable: ClassVar[bool]  # whether all ranks make the same exchanges, which relaying requires


S = TypeVar("S", bound=Named, covariant=True)
N = TypeVar("N", bound=Named)


@dataclass(frozen=True, eq=False)
class BoundStrategy(Generic[S]):
    """A strategy on a group: everything of a module that its operators need.

    Modules with the same options on the same group share one object, and therefore also one
    compiled graph.

    Attributes:
        key: the string that operators carry. It consists of the strategy, its options, the group,
            the rank check and the routing.
    """

    strategy: S
    comm: Comm
    check_ranks: bool
    routing: Routing | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        if self.routing is None:
            return
        if not isinstance(self.routing, Routing):
            found = shown(self.routing)
            raise ValueError(f"routing must be a seqpar.Routing or None, got {found}")
        if not self.strategy.routable:
            reason = "its ranks do not all make the same exchanges"
            raise ValueError(f"routing must be None for {self.strategy.name!r}: {reason}")
        # Raises an error if the group cannot be divided into the nodes.
        Relays.of(self.comm, self.routing)

    @classmethod
    def make(
        cls,
        strategy: N,
        group: Group,
        dimensions: int,
        check_ranks: bool,
        routing: Routing | None = None,
    ) -> BoundStrategy[N]:
        """Bind a strategy to a group or a mesh.

        Raises a ValueError if the group or mesh has another number of dimensions than `dimensions`
        (a group has 1), or if it does not fit `routing`.
        """
        comm = Comm.of(group)
        if len(comm.shape) != dimensions:
            expected = "group must have 1 dimension"
            if dimensions > 1:
                expected = f"mesh must have {dimensions} dimensions"
            raise ValueError(f"{expected}, got one of shape {comm.shape}")
        return BoundStrategy(strategy, comm, bool(check_ranks), routing).shared()

    def __deepcopy__(self, memo: object) -> BoundStrategy[S]:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _rebind, (self.strategy, _address_of(self.comm), self.check_ranks, self.routing)

    @staticmethod
    def of(key: str) -> BoundStrategy[Any]:
        """Return the bound strategy with this key. A module or a saved graph keeps it alive.

        Raises a RuntimeError if there is none in this process, for example because an exported
        program was loaded before the module was made.
        """
        found = _by_key.get(key)
        if found is None:
            wanted = "make it first, with the same options, on the group of the same name"
            raise RuntimeError(f"this process has no attention module {key!r}: {wanted}")
        return found

    def shared(self) -> BoundStrategy[S]:
        """Return the object that all modules with this configuration share.

        torch may give the name of a destroyed group to a later group. If a module of the destroyed
        group still exists, it keeps its key, and the key of a module on the later group gets a
        number. The two modules therefore never share an object.
        """
        name = f"{self.strategy}/{self.comm.name}/{self.check_ranks:d}/{self.routing}"
        for number in itertools.count(1):
            key = name if number == 1 else f"{name}/{number}"
            object.__setattr__(self, "key", key)  # set before other threads can find the object
            known = _by_key.setdefault(key, self)
            if known.comm is self.comm:
                break
        return cast("BoundStrategy[S]", known)

    def keep(self) -> None:
        """Keep this object alive as long as its group exists, because calls without a module have
        only the key.
        """
        group = self.comm._group()
        if group is not None:
            _kept.setdefault(group, {})[self.key] = self

    def resolve_checked(
        self,
        device: torch.device,
        resolve: Callable[[], C],
        shared: Callable[[C, bool], Described],
    ) -> tuple[C, Comm]:
        """Return `resolve()`, and the Comm of a new call, whose tensors are on `device`.

        With `check_ranks`, all ranks raise the same error unless they make the same call and none
        of them refuses it. `shared(call, exact)` returns the arguments of the resolved call that
        must be the same on all ranks (`compare_calls`). Without `check_ranks`, a call that this
        rank refuses is not counted as a call: the other ranks may still wait for the correct one.
        """
        if not self.check_ranks:
            call = resolve()
            comm = self.comm.call()
            comm.join(device)
            return call, comm
        call, fault = attempt(resolve)
        comm = self.comm.call()
        if comm.sends_from(device):  # if it does not, `fault` is set and nothing can be sent
            comm.join(device)

        def compared(exact: bool) -> Described:
            if fault is not None:  # all ranks raise the fault, so nothing needs to be compared
                return {}
            return shared(call, exact) | {"routing": str(self.routing)}

        compare_calls(comm, self.strategy, fault, compared)
        return call, comm

    def routed(self, comm: Comm, device: torch.device, direction: str, shared: Described) -> Comm:
        """Return the Comm of one pass of a call. It relays messages if `routing` says so.

        The tensors are on `device`. The messages of a pass depend only on the type of the device
        and on `shared`, which are the same on all ranks. They depend on the device because results
        of a GPU's kernels may be sent in half precision, and those of a CPU are sent in fp32.
        """
        assert self.routing is not None
        relays = Relays.of(self.comm, self.routing)
        if relays is None:
            return comm
        kind = json.dumps([str(self.strategy), direction, device.type, shared])
        return relays.in_pass(comm, device, kind)

    def announce(self, direction: str) -> None:
        if (trace := hooks().trace) is not None:
            trace.begin(f"{self.strategy.name} {direction}", self.comm.rank)


def _rebind(
    strategy: N, address: _Address, check_ranks: bool, routing: Routing | None = None
) -> BoundStrategy[N]:
    return BoundStrategy(strategy, _reconnect(address), check_ranks, routing).shared()


class _Address(NamedTuple):
    """A description of a group that can be pickled."""

    name: str  # torch's name of the group, which depends on the order in which groups were made
    ranks: tuple[int, ...]  # the global rank of each rank of the process group
    order: tuple[int, ...]  # for each rank of the Comm, its rank in the process group
    shape: tuple[int, ...]  # a mesh's shape, or (ranks,)
    world: bool  # whether it is the default group


def _address_of(comm: Comm) -> _Address:
    group = comm.process_group
    ranks = tuple(dist.get_process_group_ranks(group))
    order = tuple(comm._order)
    return _Address(group.group_name, ranks, order, comm.shape, group is dist.group.WORLD)


def _reconnect(address: _Address) -> Comm:
    """Return the Comm of the group in this process that an address describes.

    The address of a default group stands for the default group of this process, which may have a
    different size unless the address is of a mesh. Any other address stands for the group with the
    same name and ranks. If there is none, it stands for the first group with the same ranks. A
    RuntimeError names a missing group.
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


def _described(address: _Address) -> str:
    kind = f"a mesh of shape {address.shape}" if len(address.shape) > 1 else "a group"
    called = "the default group" if address.world else f"the process group {address.name!r}"
    ranks = list(address.ranks)
    return f"the module is on {kind}, and to load it needs {called} of the global ranks {ranks}"


_by_key: weakref.WeakValueDictionary[str, BoundStrategy[Named]] = weakref.WeakValueDictionary()
_kept: weakref.WeakKeyDictionary[ProcessGroup, dict[str, BoundStrategy[Named]]]
_kept = weakref.WeakKeyDictionary()
