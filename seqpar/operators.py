"""What the operators of both kinds of attention share."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

from torch import Tensor

Count = Annotated[int, "SymInt"]  # a number that torch.compile does not specialise on
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
    """Return an operator's schema, as in "Tensor layout, SymInt tokens", for a NamedTuple's fields.

    It follows from their annotations.
    """
    hints = get_type_hints(arguments, include_extras=True)
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints.items())


def unit_stride(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last dimension, which every backend takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refuse_double_backward(ctx: Any, *_: Any) -> None:
    """Raise a RuntimeError, since the gradient of a gradient would be wrong silently."""
    raise RuntimeError("seqpar attention cannot be differentiated twice (create_graph=True)")
