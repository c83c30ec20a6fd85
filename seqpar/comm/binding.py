"""Bind strategies to groups, and find them again by a key that is a string."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from seqpar.comm.agreement import C, Described, Fault, compare_calls
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.comm.reconnect import Address, address_of, reconnect
from seqpar.comm.routing.relays import Relays
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import shown
from seqpar.core.hooks import hooks


class Named(Protocol):
    """A strategy: it has a name, and str() of it has all of its options."""

    name: ClassVar[str]
    routable: ClassVar[bool]  # whether all ranks make the same exchanges, as relays need


S = TypeVar("S", bound=Named, covariant=True)
N = TypeVar("N", bound=Named)


@dataclass(frozen=True, eq=False)
class BoundStrategy(Generic[S]):
    """A strategy on a group: what operators know of the module that called them.

    Modules with the same options on the same group share one, and so a compiled graph.
    """

    strategy: S
    comm: Comm
    check_ranks: bool
    routing: Routing | None = None

    def __post_init__(self) -> None:
        if self.routing is None:
            return
        if not isinstance(self.routing, Routing):
            found = shown(self.routing)
            raise ValueError(f"routing must be a seqpar.Routing or None, got {found}")
        if not self.strategy.routable:
            reason = "its ranks do not all make the same exchanges"
            raise ValueError(f"routing must be None for {self.strategy.name!r}: {reason}")
        Relays.of(self.comm, self.routing)  # which raises what is wrong with the group's nodes

    @classmethod
    def make(
        cls,
        strategy: N,
        group: Group,
        dimensions: int,
        check_ranks: bool,
        routing: Routing | None = None,
    ) -> BoundStrategy[N]:
        """Bind a strategy to a group, or to a mesh.

        Raise a ValueError if that does not have so many `dimensions` (a group has 1), or if
        messages cannot be routed so.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebind, (self.strategy, address_of(self.comm), self.check_ranks, self.routing)

    @staticmethod
    def of(key: str) -> BoundStrategy[Any]:
        """Return the bound strategy with this key. A module, or a saved graph, keeps it alive.

        Raise a RuntimeError if there is none, as where an exported program was loaded.
        """
        found = _by_key.get(key)
        if found is None:
            wanted = "make it first, with the same options, on the group of the same name"
            raise RuntimeError(f"this process has no attention module {key!r}: {wanted}")
        return found

    @property
    def key(self) -> str:
        """The string that operators are given: strategy, options, group, whether ranks check."""
        return f"{self.strategy}/{self.comm.name}/{self.check_ranks:d}/{self.routing}"

    def shared(self) -> BoundStrategy[S]:
        """Return the bound strategy that all modules of this configuration share."""
        known = _by_key.get(self.key)
        if known is None or known.comm is not self.comm:
            known = _by_key[self.key] = self
        return known

    def keep(self) -> None:
        """Keep this alive, and so what its key names, for as long as its process group lives.

        That is for graphs, which hold nothing but the key, of calls that no module makes.
        """
        group = self.comm._group()
        if group is not None:
            _kept.setdefault(group, {})[self.key] = self

    def resolve_checked(
        self,
        device: torch.device,
        resolve: Callable[[], C],
        shared: Callable[[bool], Described],
    ) -> tuple[C, Comm]:
        """Return `resolve()`, and the Comm of a new call, whose tensors are on `device`.

        If `check_ranks` is set, raise unless all ranks make the same call; see
        `begin_compared_call`. A call that this rank refuses by itself takes no number, since the
        other ranks may still wait for the call that is right.
        """
        if not self.check_ranks:
            call = resolve()
            return call, self.begin_call(device)
        fault: Fault | None = None
        try:
            call = resolve()
        except (ValueError, TypeError) as error:
            fault = Fault.of(error)
        comm = self.begin_compared_call(device, fault, shared)
        return call, comm

    def begin_call(self, device: torch.device) -> Comm:
        """Return the Comm of a new call, whose tensors are on `device`."""
        comm = self.comm.call()
        comm.join(device)
        return comm

    def begin_compared_call(
        self, device: torch.device, fault: Fault | None, shared: Callable[[bool], Described]
    ) -> Comm:
        """Return the Comm of a new call, if all ranks make the same one and none refuses it.

        Otherwise raise the same error on all ranks. `fault` is the one with which this rank refuses
        the call, and `shared` has what must be the same on all of them; see `compare_calls`.
        """
        comm = self.comm.call()
        if comm.sends_from(device):  # otherwise this rank has a fault
            comm.join(device)

        def compared(canonical: bool) -> Described:
            return shared(canonical) | {"routing": str(self.routing)}

        compare_calls(comm, self.strategy, fault, compared)
        return comm

    def routed(
        self, comm: Comm, device: torch.device, direction: str, shared: Callable[[], dict[str, Any]]
    ) -> Comm:
        """Return the Comm of a call for one of its passes, in which messages may be relayed.

        The tensors are on `device`. `shared` has what the messages depend on, the same on all
        ranks.
        """
        relays = None if self.routing is None else Relays.of(self.comm, self.routing)
        if relays is None:
            return comm
        kind = json.dumps([str(self.strategy), direction, shared()])
        return relays.in_pass(comm, device, kind)

    def announce(self, direction: str) -> None:
        """Tell the trace, if there is one, that this strategy begins its `direction`."""
        if hooks.trace is not None:
            hooks.trace.begin(f"{self.strategy.name} {direction}", self.comm.rank)


def _rebind(
    strategy: N, address: Address, check_ranks: bool, routing: Routing | None = None
) -> BoundStrategy[N]:
    """Bind an unpickled strategy to the group of this process that has the address."""
    return BoundStrategy(strategy, reconnect(address), check_ranks, routing).shared()


_by_key: weakref.WeakValueDictionary[str, BoundStrategy[Any]] = weakref.WeakValueDictionary()
_kept: weakref.WeakKeyDictionary[ProcessGroup, dict[str, BoundStrategy[Any]]]
_kept = weakref.WeakKeyDictionary()
