"""`BoundStrategy`: a strategy together with a group of ranks, which operators find by a string.

An argument of a torch operator can be a string, but not any Python object. A bound strategy can be
pickled. In another process, it finds its group by the name and the ranks of the group.
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
    """The interface of a strategy. `str(strategy)` must contain all options."""

    name: ClassVar[str]
    routable: ClassVar[bool]  # whether all ranks make the same exchanges, as relaying requires


S = TypeVar("S", bound=Named, covariant=True)
N = TypeVar("N", bound=Named)


@dataclass(frozen=True, eq=False)
class BoundStrategy(Generic[S]):
    """A strategy together with a group of ranks.

    All modules with the same options and the same group share one object, so torch.compile makes
    one graph for all of these modules.

    Attributes:
        key: the string by which torch operators find the object. It consists of the strategy with
            its options, the group, `check_ranks` and `routing`.
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
        # This raises an error if the group cannot be divided into nodes.
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
        """Make the `BoundStrategy` of a strategy and a group or mesh.

        Raises a ValueError if the group or mesh does not have the given number of dimensions. A
        group has 1 dimension. Also raises a ValueError if the group cannot be divided into the
        nodes of `routing`.
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
        """Return the `BoundStrategy` (a strategy together with a group of ranks) that has this key.

        Raises a RuntimeError if there is none in this process, for example because an exported
        program was loaded before its module was made.
        """
        found = _by_key.get(key)
        if found is None:
            wanted = "make it first, with the same options, on the group of the same name"
            raise RuntimeError(f"this process has no attention module {key!r}: {wanted}")
        return found

    def shared(self) -> BoundStrategy[S]:
        """Return the one object that all modules with the same strategy and group share."""
        name = f"{self.strategy}/{self.comm.name}/{self.check_ranks:d}/{self.routing}"
        for number in itertools.count(1):
            # torch may reuse the name of a destroyed group. If a module of the destroyed group
            # still exists, a number makes the new key different from the key of that module.
            key = name if number == 1 else f"{name}/{number}"
            object.__setattr__(self, "key", key)  # set before other threads can find the object
            known = _by_key.setdefault(key, self)
            if known.comm is self.comm:
                break
        return cast("BoundStrategy[S]", known)

    def keep(self) -> None:
        """Keep this object alive as long as its group, for functions without a module."""
        group = self.comm._group()
        if group is not None:
            _kept.setdefault(group, {})[self.key] = self

    def resolve_checked(
        self,
        device: torch.device,
        resolve: Callable[[], C],
        shared: Callable[[C, bool], Described],
    ) -> tuple[C, Comm]:
        """Return the result of `resolve`, and a Comm for a new call with tensors on `device`.

        With `check_ranks`, all ranks raise the same error if two ranks make different calls, or if
        `resolve` raises an error on some rank. `shared(call, exact)` returns the arguments that
        `compare_calls` compares. Without `check_ranks`, a call for which `resolve` raises an error
        is not counted, so the user can correct the arguments and repeat the call.
        """
        if not self.check_ranks:
            call = resolve()
            comm = self.comm.call()
            comm.join(device)
            return call, comm
        call, fault = attempt(resolve)
        comm = self.comm.call()
        if comm.sends_from(device):  # if False, `fault` is set
            comm.join(device)

        def compared(exact: bool) -> Described:
            if fault is not None:  # all ranks raise the fault
                return {}
            return shared(call, exact) | {"routing": str(self.routing)}

        compare_calls(comm, self.strategy, fault, compared)
        return call, comm

    def routed(self, comm: Comm, device: torch.device, direction: str, shared: Described) -> Comm:
        """Return the Comm for one forward or backward, which relays messages if `routing` requires
        it.

        `shared` and the type of `device` determine the sizes of the messages.
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
    name: str  # torch's name of the group, which depends on the order in which groups were made
    ranks: tuple[int, ...]  # the global rank of each member of the process group
    order: tuple[int, ...]  # for each rank of the Comm, its rank in the process group
    shape: tuple[int, ...]  # the shape of a mesh, or (number of ranks,)
    world: bool  # whether this is the default group


def _address_of(comm: Comm) -> _Address:
    group = comm.process_group
    ranks = tuple(dist.get_process_group_ranks(group))
    order = tuple(comm._order)
    return _Address(group.group_name, ranks, order, comm.shape, group is dist.group.WORLD)


def _reconnect(address: _Address) -> Comm:
    """Return the Comm of a group in this process, given the address of a group in another process.

    The address of the default group gives the default group of this process, even if the sizes of
    the two groups are different. The address of a mesh over the default group gives the default
    group if it has the same ranks. Any other address gives the group with the same name and the
    same ranks. If there is no group with this name, the result is the first group with the same
    ranks. Raises a RuntimeError if no group has these ranks.
    """
    name, ranks, order, shape, world = address
    if not dist.is_initialized():
        way_out = "call init_process_group first"
        reason = f"but torch.distributed is not initialised here: {way_out}"
        raise RuntimeError(f"{_described(address)}, {reason}")
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
        raise RuntimeError(f"{_described(address)}, but this process has groups of ranks {listed}")
    return Comm._of((named or groups)[0], order, shape)


def _described(address: _Address) -> str:
    kind = f"a mesh of shape {address.shape}" if len(address.shape) > 1 else "a group"
    called = "the default group" if address.world else f"the process group {address.name!r}"
    ranks = list(address.ranks)
    return f"to load a module on {kind}, a process needs {called} of the global ranks {ranks}"


_by_key: weakref.WeakValueDictionary[str, BoundStrategy[Named]] = weakref.WeakValueDictionary()
_kept: weakref.WeakKeyDictionary[ProcessGroup, dict[str, BoundStrategy[Named]]]
_kept = weakref.WeakKeyDictionary()
