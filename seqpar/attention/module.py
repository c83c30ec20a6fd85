"""The base class of all attention modules. A module consists of a strategy and a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from seqpar.attention.operands import naming_rank
from seqpar.attention.operators import register_flop_formulas
from seqpar.attention.rehearsal import Preparation, described_call
from seqpar.attention.unknown_arguments import call_arguments, unknown_argument, unknown_option
from seqpar.comm.binding import BoundStrategy, Named
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.comm import Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import as_bool, as_int, shown
from seqpar.core.compiling import is_traced, outside_graphs
from seqpar.core.traffic import Traffic, summed
from seqpar.layout.layout import Layout


class Moving(Named, Protocol):
    """A strategy whose method `traffic` lists the messages of a call."""

    def traffic(self, call: Any, rank: int) -> list[Traffic]:
        """Return the messages of a rank in a resolved call, by pass, step and peer."""


S = TypeVar("S", bound=Moving)

_MADE_OUTSIDE = "seqpar: attention modules are made outside of the graph, once, and called inside"
NO_OPTION = {"option": False}  # metadata of a strategy's field that users cannot set


def make_strategy(
    kind: type[S],
    options: dict[str, object],
    others: tuple[str, ...],
    forward: Callable[..., object],
) -> S:
    """Return a strategy with the given options, or raise a TypeError for an unknown option.

    The error lists the options of the strategy, and the further options of the module, `others`.
    `forward` is the function that users call. If the unknown option has the same purpose as an
    argument of `forward`, the error names this argument.
    """
    known = [f.name for f in fields(kind) if f.metadata.get("option", True)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown_option(name, kind.name, [*known, *others], call_arguments(forward))
    return kind(**options)


class BoundModule(nn.Module, Generic[S]):
    """The base class of attention modules. A module consists of a strategy and a group of ranks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        outside_graphs(cls.__init__, _MADE_OUTSIDE)

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
        self._key = self._bound.key  # the group may have a different name in this process

    @property
    def rank(self) -> int:
        """This process's rank in the group. Ranks of a mesh are counted along its rows."""
        return self._bound.comm.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return self._bound.comm.size

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far, in all calls on the group.

        With `routing`, this number includes the bytes of messages that the rank relays. In the
        first forward, ranks on GPUs exchange texts to compare their kernels. The number does not
        include these texts.
        """
        return self._bound.comm.sent_bytes

    def extra_repr(self) -> str:
        check_ranks, routing = self._bound.check_ranks, self._bound.routing
        routed = "" if routing is None else f", routing={routing}"
        return f"rank={self.rank}, ranks={self.ranks}, check_ranks={check_ranks}{routed}"

    @outside_graphs
    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> str | None:
        """Return the reason why this rank would refuse a call with these arguments, or None.

        Wrong argument types and unknown argument names are reported too. This method computes and
        sends nothing.
        """
        try:
            self._resolve(q, k, v, layout, **options)
        except (ValueError, TypeError) as refusal:
            return str(refusal)
        return None

    @outside_graphs
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
        """Return the messages that a rank sends in a call, by pass, step and peer.

        Pass the arguments of a call. Of the tensors, only shapes, dtypes and devices matter. Meta
        tensors stand for tensors on a GPU with FlashAttention-4. The default of `rank` is this
        rank. This method computes and sends nothing. The rows of the backward pass assume that all
        ranks run backward. With `return_lse`, they also assume that lse has a gradient.
        """
        call = self._resolve(q, k, v, layout, **options)
        rank = self.rank if rank is None else as_int("rank", rank, 0)
        if rank >= self.ranks:
            limit = f"the group's {self.ranks} ranks"
            raise ValueError(f"rank must be below {limit}, got {shown(rank)}")
        return summed(self._messages(call, rank, options))

    def _messages(self, call: Any, rank: int, options: dict[str, object]) -> list[Traffic]:
        return self._bound.strategy.traffic(call, rank)

    @outside_graphs
    def preparation(
        self,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_heads: int | None = None,
        device: torch.device | str | None = None,
        backward: bool = True,
        **options: Any,
    ) -> Preparation:
        """Return a function that builds the tables of a layout ahead of its first call.

        The result can be pickled, and `preparation(layout)` works in any process, for example in
        the workers of `seqpar.balance.Batches(…, prepare=preparation)`. If the layout is pickled
        afterwards, it contains its tables, so the first call on a GPU only copies them to the GPU.
        A call with different arguments builds its own tables.

        Args:
            heads: the number of query heads.
            kv_heads: the number of key heads or states. Default: `heads`.
            head_dim: the head dim of q and k.
            dtype: the dtype of q, k and v.
            device: the device of q, k and v. Default: the current GPU if there is a GPU and the
                group can send from it. In all other cases, the default is the CPU.
            backward: whether calls have a backward.
            options: `value_dim` (default: `head_dim`), `batch` (default: 1), and those arguments of
                the calls on which tables depend. For softmax attention these are all arguments
                except `kv_layout`. Pass True for `sinks` and `alibi_slopes` if the calls have them.
                For linear attention they are `causal`, `return_state`, and `initial_state`, which
                is True if the calls have one.

        Raises:
            ValueError: if an argument is wrong, or if the module decides in each call what it sends
                (`AutoAttention`, and attention on a `ServerPool`). The message names the argument.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        described = described_call(
            self._bound, dtype, device, backward, batch=options.pop("batch", 1), heads=heads,
            kv_heads=kv_heads, dim=head_dim, value_dim=options.pop("value_dim", head_dim),
        )  # fmt: skip
        return self._preparation(described, options)

    def _preparation(self, described: dict[str, Any], options: dict[str, Any]) -> Preparation:
        raise NotImplementedError

    def _resolve(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object) -> Any:
        known = call_arguments(self.forward)
        others = {name: x for name, x in options.items() if name not in known}
        if others:
            raise unknown_argument(others, known)
        # Raises a TypeError if an argument is missing.
        inspect.signature(self.forward).bind(q, k, v, layout, **options)
        with naming_rank(self._bound.comm):
            tensors, arguments, _ = self._operator_inputs(q, k, v, layout, **options)
        return self._to_call(tensors, arguments)

    def _agreed_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: object
    ) -> tuple[Any, Any, HeadPlacement]:
        """Return the tensors of the operator, its other arguments, and the placement of heads, or
        raise an error.

        If this rank refuses the inputs and `check_ranks` is True, all ranks raise the error. With
        `check_ranks=False`, only this rank raises the error.
        """
        try:
            inputs = self._operator_inputs(q, k, v, layout, **options)
        except (ValueError, TypeError) as fault:
            self._refuse(fault, q, k, v)
        if inputs[0][0].is_meta:
            self._to_call(*inputs[:2])
        return inputs

    def _refuse_others(self, others: Mapping[str, object], *operands: object) -> NoReturn:
        self._refuse(unknown_argument(others, call_arguments(self.forward)), *operands)

    def _refuse(self, fault: Exception, *operands: object) -> NoReturn:
        if is_traced():
            raise fault  # the frame then runs uncompiled, and all ranks raise the error
        raise_fault(self._bound, fault, *operands)

    @contextmanager
    def agreeing(self, *operands: object) -> Iterator[None]:
        """If a ValueError or TypeError is raised within this context, raise it on all ranks.

        In two cases, only this rank raises the error: with `check_ranks=False`, and if all tensors
        among `operands` are meta tensors.
        """
        try:
            yield
        except (ValueError, TypeError) as fault:
            self._refuse(fault, *operands)

    def _operator_inputs(self, *operands: Any, **options: Any) -> tuple[Any, Any, HeadPlacement]:
        """Return the tensors of the operator, its other arguments, and the placement of heads.

        This method sends nothing.
        """
        raise NotImplementedError

    def _to_call(self, tensors: Any, arguments: Any) -> Any:
        raise NotImplementedError


def _check_names(
    module: BoundModule[Any], positional: tuple[object, ...], named: dict[str, object]
) -> None:
    """If an argument of a call is missing, raise the TypeError of the call on all ranks."""
    if not is_traced():
        with module.agreeing():
            inspect.signature(module.forward).bind(*positional, **named)


def raise_fault(bound: BoundStrategy[Named], fault: Exception, *operands: object) -> NoReturn:
    """Raise the error `fault` on all ranks.

    In two cases, only this rank raises the error: without `check_ranks`, or if all tensors among
    `operands` are meta tensors.
    """

    def resolve() -> NoReturn:
        with naming_rank(bound.comm):
            raise fault

    tensors = [x for x in operands if isinstance(x, Tensor)]
    if tensors and all(map(is_meta, tensors)):
        resolve()
    bound.resolve_checked(bound.comm.device, resolve, lambda call, exact: {})
    raise AssertionError


def is_meta(q: object) -> bool:
    return isinstance(q, Tensor) and q.device.type == "meta"
