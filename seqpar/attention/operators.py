"""Registration of torch operators, for both kinds of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqpar.core.torch_private import DispatchKeys, below_autograd, set_transform_refusal, trace

Count = Annotated[int, "SymInt"]  # torch.compile does not specialise on it
_LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Count: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}


def schema_of(arguments: type) -> str:
    """Return the schema of a NamedTuple's fields, such as "Tensor layout, SymInt tokens"."""
    hints = get_type_hints(arguments, include_extras=True)
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints.items())


# Operator -> the function of its arguments that counts its FLOPs.
FLOP_FORMULAS: dict[object, Callable[..., int]] = {}


# Operator -> its implementation, which simulations run on meta tensors.
IMPLEMENTATIONS: dict[object, Callable[..., list[Tensor]]] = {}

F = TypeVar("F", bound=Callable[..., list[Tensor]])


def implementation(operator: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        torch.library.impl(operator, ("cpu", "cuda"))(function)
        name = operator.removeprefix("seqpar::")
        IMPLEMENTATIONS[getattr(torch.ops.seqpar, name).default] = function
        return function

    return register


@cache
def register_flop_formulas() -> None:
    """Register FLOP formulas with torch's counter, whose import takes long, on first use."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for operator, formula in FLOP_FORMULAS.items():
        if operator not in flop_registry:
            register_flop_formula(operator, get_raw=True)(formula)


torch.library.define("seqpar::after", "(Tensor x, Tensor earlier) -> Tensor")


@torch.library.impl("seqpar::after", ("cpu", "cuda"))
def _after(x: Tensor, earlier: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("seqpar::after")  # type: ignore[untyped-decorator]
def _after_fake(x: Tensor, earlier: Tensor) -> Tensor:
    return torch.empty_like(x)


def in_order(x: Any, call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Return `call(x)`, the results of an operator that communicates.

    Compilers order operators that do not depend on each other by the sizes on their own rank. Ranks
    that choose different orders would exchange messages of different calls. In a traced graph x, a
    small tensor, therefore depends on the previous call.
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


def register_autograd(
    operator: str,
    inputs: int,
    backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, tuple[Any, ...], list[Tensor]], None],
    handle: int | None = None,
) -> None:
    """Register the derivative of an operator that returns a list of tensors.

    The first `inputs` arguments may have gradients, and are tensors or None. `backward(ctx,
    *gradients)` returns the gradient of each of them. `save(ctx, arguments, results)` keeps the
    tensors and options that `backward` needs. Argument number `handle`, by default the first
    after the inputs, is the tensor for `in_order`.

    `torch.library.register_autograd` does the same for any schema, in three times the time.
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
        def backward(ctx: object, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return None, None, *backward(ctx, *gradients)

    def differentiable(keys: DispatchKeys, *arguments: Any) -> list[Tensor]:
        differentiated = arguments[:inputs]
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in differentiated
        ):
            return list(Derivative.apply(keys, arguments, *differentiated))
        return call(keys, arguments)

    _LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def refuse_double_backward(ctx: object, *_: object) -> None:
    raise RuntimeError("seqpar attention cannot be differentiated twice (create_graph=True)")


def refuse_transforms(operator: str) -> None:
    """Make an operator raise under torch.func's transforms, instead of returning zeros."""
    set_transform_refusal(operator, _refuse_transform)


def _refuse_transform(*_: object, **__: object) -> None:
    raise NotImplementedError(
        "seqpar attention cannot be called within torch.func's grad, vjp, vmap and the like: "
        "it has no forward-mode derivative, and for gradients there is torch.autograd.grad"
    )


def refuse_tangents(**tensors: Tensor | None) -> None:
    """Raise a ValueError that names a tensor with a forward-mode tangent, which would be lost."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            reason = "seqpar attention has no forward-mode derivative"
            raise ValueError(f"{name} must not have a tangent: {reason}")
