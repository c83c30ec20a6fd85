"""What the modules of both kinds of attention share: a strategy bound to a group."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from seqpar.arguments import as_int
from seqpar.comm.binding import BoundStrategy, Named
from seqpar.comm.exchange import Group
from seqpar.layout.layout import Layout
from seqpar.operators import register_flop_formulas
from seqpar.traffic import Traffic, summed


class Moving(Named, Protocol):
    """A strategy that can say what it sends."""

    def traffic(self, call: Any, rank: int) -> list[Traffic]:
        """Return what a rank sends in a resolved call, by pass, step and peer."""


S = TypeVar("S", bound=Moving)


class BoundModule(nn.Module, Generic[S]):
    """The base of attention modules: a strategy, on a group of ranks that compute together."""

    def __init__(self, strategy: S, group: Group, dimensions: int, check_ranks: bool) -> None:
        super().__init__()
        register_flop_formulas()
        self._bound: BoundStrategy[S] = BoundStrategy.make(strategy, group, dimensions, check_ranks)
        self._key = self._bound.key

    @property
    def rank(self) -> int:
        """This process's rank in the group; in a mesh, its position along the mesh's rows."""
        return self._bound.comm.rank

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return self._bound.comm.size

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent so far, in all calls on the group."""
        return self._bound.comm.sent_bytes

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        check_ranks = self._bound.check_ranks
        return f"rank={self.rank}, ranks={self.ranks}, check_ranks={check_ranks}"

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> str | None:
        """Return why this rank would refuse a call with these arguments, or None.

        It computes and sends nothing.
        """
        try:
            self._resolve(q, k, v, layout, **options)
        except ValueError as refusal:
            return str(refusal)
        return None

    def traffic(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        rank: int | None = None,
        **options: Any,
    ) -> list[Traffic]:
        """Return what a rank (default: this one) sends in a call, by pass, step and peer.

        The arguments are those of a call; of the tensors just the shapes matter. It computes and
        sends nothing. The rows of backward hold if all ranks run it; with `return_lse`, if it goes
        through lse too.
        """
        call = self._resolve(q, k, v, layout, **options)
        rank = self.rank if rank is None else as_int("rank", rank, 0)
        if rank >= self.ranks:
            raise ValueError(f"rank must be below the group's {self.ranks} ranks, got {rank}")
        return summed(self._bound.strategy.traffic(call, rank))

    def _resolve(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Any:
        """Return the call as strategies read it, or raise the ValueError that refuses it."""
        raise NotImplementedError
