"""The base class of all attention modules: a strategy bound to a group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from seqpar.attention.operands import naming_rank
from seqpar.attention.operators import register_flop_formulas
from seqpar.comm.binding import BoundStrategy, Named
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.exchange import Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import as_bool, as_int, shown
from seqpar.core.traffic import Traffic, summed
from seqpar.layout.layout import Layout


class Moving(Named, Protocol):
    """A strategy that lists its messages without sending them."""

    def traffic(self, call: Any, rank: int) -> list[Traffic]:
        """Return a rank's messages in a resolved call, by pass, step and peer."""


S = TypeVar("S", bound=Moving)

NO_OPTION = {"option": False}  # metadata of a strategy's field that users cannot set


def make_strategy(kind: type[S], options: dict[str, object], others: tuple[str, ...]) -> S:
    """Return a strategy; the TypeError for an unknown option lists known ones and `others`."""
    known = [f.name for f in fields(kind) if f.metadata.get("option", True)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            listed = ", ".join([*known, *others])
            raise TypeError(f"{name} is not an option of {kind.name!r}, which has {listed}")
    return kind(**options)


class BoundModule(nn.Module, Generic[S]):
    """The base class of attention modules: a strategy on a group of ranks that compute together."""

    def __init__(
        self,
        strategy: S,
        group: Group,
        dimensions: int,
        check_ranks: bool,
        routing: Routing | None = None,
    ) -> None:
        super().__init__()
        register_flop_formulas()
        check_ranks = as_bool("check_ranks", check_ranks)
        self._bound: BoundStrategy[S] = BoundStrategy.make(
            strategy, group, dimensions, check_ranks, routing
        )
        self._key = self._bound.key
        if check_ranks:
            self.register_forward_pre_hook(_check_names, with_kwargs=True)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._key = self._bound.key  # this process may have another name for the group

    @property
    def rank(self) -> int:
        """This process's rank in the group; in a mesh, its position along the mesh's rows."""
        return self._bound.comm.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return self._bound.comm.size

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far, in all calls on the group.

        With a `routing` they include relayed messages.
        """
        return self._bound.comm.sent_bytes

    def extra_repr(self) -> str:
        check_ranks, routing = self._bound.check_ranks, self._bound.routing
        routed = "" if routing is None else f", routing={routing}"
        return f"rank={self.rank}, ranks={self.ranks}, check_ranks={check_ranks}{routed}"

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> str | None:
        """Return the reason why this rank would refuse a call with these arguments, or None.

        The reason may also be the type or name of an argument. This computes and sends nothing.
        """
        try:
            self._resolve(q, k, v, layout, **options)
        except (ValueError, TypeError) as refusal:
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
        **options: object,
    ) -> list[Traffic]:
        """Return the messages of a rank (default: this one) in a call, by pass, step and peer.

        Takes the arguments of a call, and uses only the shapes and dtypes of tensors. This computes
        and sends nothing. The rows of backward hold if all ranks run it and, with `return_lse`, if
        it goes through lse too.
        """
        call = self._resolve(q, k, v, layout, **options)
        rank = self.rank if rank is None else as_int("rank", rank, 0)
        if rank >= self.ranks:
            limit = f"the group's {self.ranks} ranks"
            raise ValueError(f"rank must be below {limit}, got {shown(rank)}")
        return summed(self._messages(call, rank, options))

    def _messages(self, call: Any, rank: int, options: dict[str, object]) -> list[Traffic]:
        return self._bound.strategy.traffic(call, rank)

    def _resolve(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object) -> Any:
        call = inspect.signature(self.forward)
        for name in options:
            if name not in call.parameters:
                known = ", ".join(call.parameters)
                raise TypeError(f"{name} is not an argument of a call; those are {known}")
        call.bind(q, k, v, layout, **options)  # raises a TypeError if one is missing
        with naming_rank(self._bound.comm):
            tensors, arguments, _ = self._operator_inputs(q, k, v, layout, **options)
        return self._to_call(tensors, arguments)

    def _agreed_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> tuple[Any, Any, HeadPlacement]:
        """Return `_operator_inputs`; raise their fault on all ranks, if these check their calls.

        Meta tensors are resolved here, because the operator's fake rule checks nothing.
        """
        try:
            inputs = self._operator_inputs(q, k, v, layout, **options)
        except (ValueError, TypeError) as fault:
            self._refuse(fault, q, k, v)
        if is_meta(q):
            self._to_call(*inputs[:2])
        return inputs

    def _refuse(self, fault: Exception, *operands: object) -> NoReturn:
        if torch.compiler.is_compiling():
            raise fault  # the frame then runs uncompiled and reaches this line again
        raise_fault(self._bound, fault, *operands)

    @contextmanager
    def agreeing(self, *operands: object) -> Iterator[None]:
        """Raise a fault from within the context on all ranks, if these check their calls.

        Only this rank raises it if all tensors among the operands are meta tensors.
        """
        try:
            yield
        except (ValueError, TypeError) as fault:
            self._refuse(fault, *operands)

    def _operator_inputs(self, *operands: Any, **options: Any) -> tuple[Any, Any, HeadPlacement]:
        """Return the operator's tensors, other arguments and placement of heads; send nothing."""
        raise NotImplementedError

    def _to_call(self, tensors: Any, arguments: Any) -> Any:
        raise NotImplementedError


def _check_names(
    module: BoundModule[Any], positional: tuple[object, ...], named: dict[str, object]
) -> None:
    """Raise the TypeError of a call with wrong names on all ranks, not only on this rank."""
    if not torch.compiler.is_compiling():
        with module.agreeing():
            inspect.signature(module.forward).bind(*positional, **named)


def raise_fault(bound: BoundStrategy[Named], fault: Exception, *operands: object) -> NoReturn:
    """Raise a call's fault on all ranks, if these check their calls and some operand has data."""

    def resolve() -> NoReturn:
        with naming_rank(bound.comm):
            raise fault

    tensors = [x for x in operands if isinstance(x, Tensor)]
    if tensors and all(map(is_meta, tensors)):
        resolve()
    bound.resolve_checked(bound.comm.device, resolve, lambda canonical: {})
    raise AssertionError


def is_meta(q: object) -> bool:
    """Return whether an operand has no data. Its call then sends nothing."""
    return isinstance(q, Tensor) and q.device.type == "meta"
