"""The torch operators that compute calls: one forward and one backward for each kind of call.

Communication is inside these operators, so torch.compile and checkpointing treat a call as a single
operator. The layout is passed to an operator as a tensor (`seqpar.layout.handle`), so a compiled
graph is not specialised on the layout of a batch. The module is passed as a string, which its
configuration determines (`seqpar.comm.binding`).

`CallOperator` has the code that all kinds of calls share. The code of each kind is in
`softmax/softmax_operator.py`, `linear/linear_operator.py` and `halo/halo_operator.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from seqpar.attention.call_arguments import Carried, fields_of
from seqpar.comm.agreement import Described
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.comm import Comm
from seqpar.comm.messages.message_header import CallDigest, empty_numbers
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.core.torch_private import (
    DispatchKeys,
    argument_names,
    below_autograd,
    never_compiled,
    set_transform_refusal,
    trace,
)
from seqpar.layout.geometry import Geometry

_LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
# For each operator, the function that counts its FLOPs from its arguments.
FLOP_FORMULAS: dict[object, Callable[..., int]] = {}


# For each operator, its implementation, which simulations call with meta tensors.
IMPLEMENTATIONS: dict[object, Callable[..., list[Tensor]]] = {}

F = TypeVar("F", bound=Callable[..., list[Tensor]])


def implementation(operator: str) -> Callable[[F], F]:
    """Return a decorator that registers a function as the implementation of an operator.

    If the operator has the argument `strategy`, which names a strategy and its group, two threads
    cannot run the function on one group at the same time.
    """

    def register(function: F) -> F:
        overload = getattr(torch.ops.seqpar, operator.removeprefix("seqpar::")).default
        names = argument_names(overload)

        def in_turn(*arguments: Any) -> list[Tensor]:
            with BoundStrategy.of(arguments[place]).comm.turn():
                return function(*arguments)

        has_strategy = "strategy" in names
        place = names.index("strategy") if has_strategy else 0
        # After a graph break here, torch.compile would trace this function like any other function.
        called = never_compiled(in_turn if has_strategy else function)
        torch.library.impl(operator, ("cpu", "cuda"))(called)
        IMPLEMENTATIONS[overload] = function
        return function

    return register


@cache
def register_flop_formulas() -> None:
    """Register FLOP formulas with torch's FLOP counter."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for operator, formula in FLOP_FORMULAS.items():
        if operator not in flop_registry:
            register_flop_formula(operator, get_raw=True)(formula)


torch.library.define("seqpar::after", "(Tensor x, Tensor earlier) -> Tensor")


@torch.library.impl("seqpar::after", ("cpu", "cuda"))
@never_compiled
def _after(x: Tensor, earlier: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("seqpar::after")  # type: ignore[untyped-decorator]
def _after_fake(x: Tensor, earlier: Tensor) -> Tensor:
    return torch.empty_like(x)


def in_order(x: Any, call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Return `call(x)`, the results of an operator that communicates. Compiled graphs run such
    operators in the order of the program.

    x is a small tensor. A compiler may reorder operators that do not depend on each other, in a
    different order on each rank. While a graph is traced, x is therefore replaced by a copy that
    depends on the results of the preceding operator.
    """
    traced = None if torch.compiler.is_dynamo_compiling() else trace()
    if traced is None:
        return call(x)
    earlier = vars(traced).get(_EARLIER)
    results = call(x if earlier is None else torch.ops.seqpar.after(x, earlier))
    setattr(traced, _EARLIER, torch.ops.seqpar.after(x, results[0]))
    return results


_EARLIER = "_earlier_call_of_seqpar"


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def differentiated(tensors: Iterable[Tensor | None]) -> bool:
    for x in tensors:  # noqa: SIM110  `any` takes several times as long
        if x is not None and x.requires_grad:
            return True
    return False


def register_autograd(
    operator: str,
    inputs: int,
    backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, tuple[Any, ...], list[Tensor]], None],
    handle: int | None = None,
) -> None:
    """Register the derivative of an operator that returns a list of tensors.

    `torch.library.register_autograd` does this for any schema, but makes each call of an operator
    three times as slow.

    Args:
        operator: the name of the operator.
        inputs: the number of arguments that may have gradients. They are the first arguments, and
            are tensors or None.
        backward: `backward(ctx, *gradients)` returns the gradient of each of the first `inputs`
            arguments.
        save: `save(ctx, arguments, results)` keeps the tensors and options that `backward` needs.
        handle: the index of the small tensor argument, such as the layout, that a compiled graph
            makes depend on the preceding call, so that calls keep their order. The default is
            `inputs`.
    """
    name = operator.removeprefix("seqpar::")
    overload = getattr(torch.ops.seqpar, name).default
    place = inputs if handle is None else handle

    def call(keys: DispatchKeys, arguments: tuple[Any, ...]) -> list[Tensor]:
        before, behind = arguments[:place], arguments[place + 1 :]
        return in_order(
            arguments[place], lambda x: below_autograd(overload, keys, (*before, x, *behind))
        )

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: object, keys: DispatchKeys, arguments: tuple[Any, ...], *_: object
        ) -> tuple[Tensor, ...]:
            results = call(keys, arguments)
            save(ctx, arguments, results)
            return tuple(results)

        @staticmethod
        @never_compiled
        def backward(ctx: object, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return None, None, *backward(ctx, *gradients)

    @never_compiled
    def differentiable(keys: DispatchKeys, *arguments: Any) -> list[Tensor]:
        tensors = arguments[:inputs]
        if torch.is_grad_enabled() and differentiated(tensors):
            return list(Derivative.apply(keys, arguments, *tensors))
        return call(keys, arguments)

    _LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def refuse_double_backward(ctx: object, *_: object) -> None:
    raise RuntimeError(
        "seqpar attention cannot be differentiated twice: call backward or grad without "
        "create_graph=True"
    )


def refuse_transforms(operator: str) -> None:
    """Make an operator raise an error under the transforms of torch.func.

    Without the error, the operator would return zeros under these transforms.
    """
    set_transform_refusal(operator, _refuse_transform)


def _refuse_transform(*_: object, **__: object) -> None:
    raise NotImplementedError(
        "seqpar attention cannot be called within torch.func's grad, vjp, vmap and other "
        "transforms: compute gradients with torch.autograd.grad"
    )


def refuse_tangents(**tensors: Tensor | None) -> None:
    """Raise a ValueError if a tensor has a forward-mode tangent, which the operators would
    ignore.
    """
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            reason = "seqpar attention has no forward-mode derivative"
            raise ValueError(f"{name} must not have a tangent: {reason}")


class Resolved(Protocol):
    @property
    def layout(self) -> Geometry: ...


T = TypeVar("T", bound=tuple[Any, ...])  # a NamedTuple of the tensors that may have gradients
A = TypeVar("A", bound=tuple[Any, ...])  # a NamedTuple of the other arguments
C = TypeVar("C", bound=Resolved)
Compared = dict[str, Tensor | None]  # small tensors whose values ranks compare, by name

_MAX_COMPARED_RANKS = 64  # comparing a layout span by span takes 0.1 ms per rank


class Results(NamedTuple):
    """The results of a forward. `outs` may have gradients, and `kept` is saved for backward."""

    outs: Sequence[Tensor]
    kept: Sequence[Tensor]


class Saved(NamedTuple):
    """What a forward saves for its backward, in addition to the arguments of the call."""

    tensors: Sequence[Tensor | None]
    sizes: Sequence[int]  # sizes of gradients that cannot be read from the tensors


class CallContext(FunctionCtx):
    saved_tensors: tuple[Tensor | None, ...]
    save_for_backward: Callable[..., None]  # torch's type does not allow None
    settings: Sequence[object]
    given: list[bool]  # which of the saved tensors are not None
    sizes: Sequence[int]
    has_gradient: list[bool]
    bound: BoundStrategy[Any]
    handles: Sequence[Tensor | None]


class CallOperator(ABC, Generic[T, A, C]):
    """One kind of call, with two operators: the forward and the backward.

    The forward operator takes tensors first, and the arguments of the call after the tensors. It
    returns three groups of values: the results that have a gradient, the numbers of the call, and
    the tensors that are kept for backward. The numbers of the call, (ranks,) on the CPU, are in the
    headers of its messages (`seqpar.comm.messages.message_header`). The backward operator takes the
    gradients of the results, the fields of `Saved`, the numbers, and the arguments of the call.
    """

    name: ClassVar[str]  # the name of the forward; the backward is `name`_backward
    outs: ClassVar[int]  # the number of results that have a gradient

    def __init__(self, tensors: Any, arguments: Any) -> None:
        self.tensors, self.arguments = tensors, Carried[A](arguments)
        self._count = len(tensors._fields)

    # What differs between kinds of calls.

    @abstractmethod
    def resolve(self, bound: BoundStrategy[Any], tensors: T, arguments: A) -> C:
        """Return the resolved call, or raise a ValueError if the call is wrong or cannot be
        computed.
        """

    @abstractmethod
    def agreed(self, bound: BoundStrategy[Any], call: C, arguments: A, exact: bool) -> Described:
        """Return the values that must be equal on all ranks, as a dict from argument names to JSON
        values.

        If `exact` is True, equal layouts have equal descriptions, even if the layouts were made in
        different ways. If `exact` is False, descriptions of equal layouts may differ, but are made
        in less time.
        """

    @abstractmethod
    def key(self, call: C, arguments: A) -> Hashable:
        """Return a hashable key. Calls with the same layout and equal keys have equal results of
        the method `agreed`.
        """

    @abstractmethod
    def forward(self, strategy: Any, comm: Comm, call: C, tensors: T, arguments: A) -> Results: ...

    @abstractmethod
    def empty(self, bound: BoundStrategy[Any], tensors: T, arguments: A) -> Results:
        """Return empty tensors with the shapes and dtypes of the results, for torch.compile."""

    @abstractmethod
    def save(
        self,
        bound: BoundStrategy[Any],
        tensors: T,
        arguments: A,
        outs: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> Saved:
        """Return the tensors and sizes that backward needs. `outs` and `kept` are the results of
        the forward.
        """

    @abstractmethod
    def resolve_again(
        self, bound: BoundStrategy[Any], comm: Comm, arguments: A, saved: Saved
    ) -> tuple[C, Compared]:
        """Return the resolved call for a backward, and the tensors whose values ranks compare."""

    @abstractmethod
    def backward(
        self,
        strategy: Any,
        comm: Comm,
        call: C,
        gradients: Sequence[Tensor | None],
        saved: Saved,
    ) -> list[Tensor]:
        """Return the gradients of those tensors of the call that have a gradient.

        `gradients` are the gradients of the results.
        """

    @abstractmethod
    def empty_gradients(self, arguments: A, saved: Saved) -> list[Tensor]:
        """Return empty tensors with the shapes and dtypes of the gradients, for torch.compile."""

    @abstractmethod
    def flops(self, tensors: T, arguments: A) -> int: ...

    @abstractmethod
    def backward_flops(self, arguments: A, saved: Saved) -> int: ...

    def compared(self, tensors: T, arguments: A) -> Compared:
        """Return small tensors whose values must be equal on all ranks, by name."""
        return {}

    def has_gradient(self, tensors: T) -> list[bool]:
        return [x is not None for x in tensors]

    # What all kinds of calls share.

    def registered(self) -> Self:
        forward, backward = f"seqpar::{self.name}", f"seqpar::{self.name}_backward"
        operands = ", ".join(x.schema for x in fields_of(self.tensors))
        gradients = ", ".join(f"Tensor? gradient_{i}" for i in range(self.outs))
        # `saved` has only the tensors that are not None, and `given` says which tensors these are.
        # If the list contained None, torch would not notice tensors that require a gradient.
        saved = "Tensor[] saved, bool[] given, SymInt[] sizes, Tensor numbers"
        schema = self.arguments.schema
        torch.library.define(forward, f"({operands}, {schema}) -> Tensor[] results")
        torch.library.define(backward, f"({gradients}, {saved}, {schema}) -> Tensor[] gradients")
        self._forward_op = getattr(torch.ops.seqpar, self.name)
        self._backward_op = getattr(torch.ops.seqpar, f"{self.name}_backward")
        implementation(forward)(self._forward)
        implementation(backward)(self._backward)
        torch.library.register_fake(forward)(self._fake)
        torch.library.register_fake(backward)(self._backward_fake)
        register_autograd(forward, self._count, self._differentiate, self._save_for_backward)
        torch.library.register_autograd(backward, refuse_double_backward)
        refuse_transforms(forward)
        FLOP_FORMULAS[self._forward_op] = self._flops
        FLOP_FORMULAS[self._backward_op] = self._backward_flops
        return self

    def __call__(self, tensors: T, arguments: A) -> list[Tensor]:
        """Call the forward operator."""
        results: list[Tensor] = self._forward_op(*tensors, *self.arguments.flat(arguments))
        return results

    def begin(self, bound: BoundStrategy[Any], tensors: T, arguments: A) -> tuple[C, Comm]:
        """Return the resolved call, and the communicator that it uses.

        With `check_ranks`, all ranks raise the same error if one rank refuses the call, or if ranks
        make different calls.
        """
        device, compared = tensors[0].device, self.compared(tensors, arguments)

        def described(call: C, exact: bool) -> Described:
            known = {name: x for name, x in compared.items() if x is not None and not x.is_meta}
            values = {name: x.tolist() for name, x in known.items()}
            return self.agreed(bound, call, arguments, exact) | values

        call, comm = bound.resolve_checked(
            device, lambda: self.resolve(bound, tensors, arguments), described
        )
        self.describe(bound, comm, call, arguments, device, compared)
        return call, comm

    def describe(
        self,
        bound: BoundStrategy[Any],
        comm: Comm,
        call: C,
        arguments: A,
        device: torch.device,
        compared: Compared,
    ) -> None:
        """Put a digest of the call's arguments into the headers of its messages."""
        if not comm.has_headers(device):
            return
        exact = call.layout.ranks <= _MAX_COMPARED_RANKS

        def build() -> CallDigest:
            described = self.agreed(bound, call, arguments, exact)
            if not exact:  # with many ranks, only documents are compared
                described["layout"] = call.layout.cu_seqlens.tolist()
                described.pop("kv_layout", None)
            names = {"strategy": str(bound.strategy), "routing": str(bound.routing)}
            return CallDigest.of(described | names)

        digests = call.layout.derived(("call digests",), lambda: Memo(MAX_KEPT_SETTINGS))
        digest = digests((self.name, self.key(call, arguments)), build)
        comm.digest = digest.extended(**compared)

    def _split(self, flat: Sequence[Any]) -> tuple[T, A]:
        tensors = self.tensors._make(flat[: self._count])
        return tensors, self.arguments.restored(flat[self._count :])

    def _forward(self, *flat: Any) -> list[Tensor]:
        tensors, arguments = self._split(flat)
        bound = BoundStrategy.of(arguments.strategy)  # type: ignore[attr-defined]
        call, comm = self.begin(bound, tensors, arguments)
        device = tensors[0].device
        bound.announce("forward")
        if bound.routing is not None:
            comm = self._routed(bound, comm, call, arguments, device, "forward")
        with without_autocast(tensors[0]):
            outs, kept = self.forward(bound.strategy, comm, call, tensors, arguments)
            return [*outs, comm.numbers.as_tensor(), *kept]

    def _routed(
        self,
        bound: BoundStrategy[Any],
        comm: Comm,
        call: C,
        arguments: A,
        device: torch.device,
        direction: str,
    ) -> Comm:
        """Return a Comm for one pass of a call that relays messages (`comm/routing/`)."""
        return bound.routed(comm, device, direction, self.agreed(bound, call, arguments, False))

    def _fake(self, *flat: Any) -> list[Tensor]:
        tensors, arguments = self._split(flat)
        bound = BoundStrategy.of(arguments.strategy)  # type: ignore[attr-defined]
        outs, kept = self.empty(bound, tensors, arguments)
        return [*outs, empty_numbers(bound.comm.size), *kept]

    def _restored(self, flat: Sequence[Any]) -> tuple[Saved, Tensor, A]:
        """Return what the forward saved, the numbers in the headers of its messages, and the
        arguments of the call.

        `flat` are all arguments of the backward operator.
        """
        tensors, given, sizes, numbers, *carried = flat[self.outs :]
        found = iter(tensors)
        saved = Saved([next(found) if some else None for some in given], sizes)
        return saved, numbers, self.arguments.restored(carried)

    def _backward(self, *flat: Any) -> list[Tensor]:
        gradients, (saved, numbers, arguments) = flat[: self.outs], self._restored(flat)
        bound = BoundStrategy.of(arguments.strategy)  # type: ignore[attr-defined]
        bound.announce("backward")
        first = saved.tensors[0]
        assert first is not None
        with without_autocast(first):
            device, comm = first.device, bound.comm.call(numbers)
            call, compared = self.resolve_again(bound, comm, arguments, saved)
            self.describe(bound, comm, call, arguments, device, compared)
            if bound.routing is not None:
                comm = self._routed(bound, comm, call, arguments, device, "backward")
            return self.backward(bound.strategy, comm, call, gradients, saved)

    def _backward_fake(self, *flat: Any) -> list[Tensor]:
        saved, _, arguments = self._restored(flat)
        return self.empty_gradients(arguments, saved)

    def keep_call(
        self, ctx: CallContext, bound: BoundStrategy[Any], flat: Sequence[Any]
    ) -> Sequence[Tensor | None]:
        """Keep the arguments `flat` of a forward in `ctx`, for its backward.

        Returns the tensors among the arguments. The caller must save these tensors with `ctx`.
        """
        count = self.arguments.tensors
        ctx.set_materialize_grads(False)
        ctx.bound = bound  # kept alive until backward, with its key
        # not saved, because hooks of saved tensors may copy them
        ctx.handles, ctx.settings = flat[:count], flat[count:]
        return ctx.handles

    def kept_call(self, ctx: CallContext) -> tuple[Sequence[Any], list[Any]]:
        """Return the arguments that `keep_call` kept, and all tensors that were saved after
        them.
        """
        count, saved = self.arguments.tensors, list(ctx.saved_tensors)
        return (*saved[:count], *ctx.settings), saved[count:]

    def _save_for_backward(
        self, ctx: CallContext, inputs: tuple[Any, ...], results: list[Tensor]
    ) -> None:
        tensors, arguments = self._split(inputs)
        outs, numbers, kept = results[: self.outs], results[self.outs], results[self.outs + 1 :]
        ctx.mark_non_differentiable(numbers, *kept)
        bound = BoundStrategy.of(arguments.strategy)  # type: ignore[attr-defined]
        handles = self.keep_call(ctx, bound, inputs[self._count :])
        saved = self.save(bound, tensors, arguments, outs, kept)
        ctx.sizes, ctx.has_gradient = saved.sizes, self.has_gradient(tensors)
        ctx.given = [x is not None for x in saved.tensors]
        # a checkpoint compares it with the mark of its second run
        mark = getattr(handles[0], "mark", None)
        ctx.save_for_backward(*handles, mark, numbers, *[x for x in saved.tensors if x is not None])

    def _differentiate(
        self, ctx: CallContext, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arguments, (_, numbers, *tensors) = self.kept_call(ctx)
        saved = *gradients[: self.outs], tensors, ctx.given, ctx.sizes
        operator = self._backward_op
        found = iter(in_order(numbers, lambda x: operator(*saved, x, *arguments)))
        return tuple([next(found) if some else None for some in ctx.has_gradient])

    def _flops(self, *flat: Any, out_val: object = None) -> int:
        return self.flops(*self._split(flat))

    def _backward_flops(self, *flat: Any, out_val: object = None) -> int:
        saved, _, arguments = self._restored(flat)
        return self.backward_flops(arguments, saved)
