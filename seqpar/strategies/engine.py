"""Engines: what operators know of a module, by a key that its configuration determines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from seqpar import tracing
from seqpar.comm import Comm, Group
from seqpar.strategies.agree import C, agree


class Named(Protocol):
    """A strategy: its name, and a representation that has all of its options."""

    name: ClassVar[str]


S = TypeVar("S", bound=Named)


@dataclass(frozen=True, eq=False)
class Engine(Generic[S]):
    """A module's configuration. Modules with the same one share an engine, and so a compiled graph."""

    strategy: S
    comm: Comm
    check_ranks: bool

    _alive: ClassVar[weakref.WeakValueDictionary[str, Engine[Any]]] = weakref.WeakValueDictionary()

    @classmethod
    def make(cls, strategy: S, group: Group, dimensions: int, check_ranks: bool) -> Engine[S]:
        """The engine of a module on a group, or mesh, of so many dimensions."""
        comm = Comm.of(group)
        if len(comm.shape) != dimensions:
            what = "group must have 1 dimension" if dimensions == 1 else f"mesh must have {dimensions} dimensions"
            raise ValueError(f"{what}, got one of shape {comm.shape}")
        return cls(strategy, comm, bool(check_ranks)).interned()

    def __deepcopy__(self, memo: object) -> Engine[S]:
        return self

    @staticmethod
    def of(key: str) -> Engine[Any]:
        return Engine._alive[key]

    @property
    def key(self) -> str:
        return f"{self.strategy}/{self.comm.name}/{self.check_ranks:d}"

    def checked(self, check: Callable[[], C], shared: Callable[[], dict[str, Any]]) -> C:
        """The call, checked here, and if that is wanted on all ranks, for which `shared` has what must be the same."""
        return agree(self.comm, self.strategy, check, shared()) if self.check_ranks else check()

    def begins(self, direction: str) -> None:
        """Tell errors and traces what this rank is doing."""
        self.comm.doing = f"{self.strategy.name} {direction}"
        if tracing.current is not None:
            tracing.current.begin(self.comm.doing, self.comm.rank)

    def interned(self) -> Engine[S]:
        known = self._alive.get(self.key)
        if known is None or known.comm is not self.comm:
            known = self._alive[self.key] = self
        return known
