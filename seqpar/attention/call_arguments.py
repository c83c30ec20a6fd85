"""Convert the arguments of a call, except q, k and v, between modules and torch operators.

Each kind of call declares its arguments as a NamedTuple. The first fields are tensors. The last
field may be a NamedTuple of scalars, which an operator takes one by one. A field that is annotated
with an `Option` is a scalar that users pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor

A = TypeVar("A", bound=tuple[Any, ...])  # a NamedTuple of arguments

Count = Annotated[int, "SymInt"]  # an integer on which torch.compile does not specialise
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Count: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}
_SCALARS = int, float, bool, str
NOT_CARRIED = "not carried"  # annotates a field that operators do not take


class Option(NamedTuple):
    """Marks a field as a scalar that users pass to a call."""

    parse: Callable[[str, Any], Any]  # takes the name and the user's value; raises a ValueError
    default: Any
    name: str = ""  # the argument name, if it differs from the name of the field


class Field(NamedTuple):
    name: str
    kind: Any
    option: Option | None

    @property
    def public_name(self) -> str:
        return self.option.name or self.name if self.option else self.name

    @property
    def schema(self) -> str:
        return f"{_SCHEMA_TYPES[self.kind]} {self.name}"


def fields_of(arguments: type) -> list[Field]:
    """Return the fields of a NamedTuple that operators take as arguments.

    If a field is itself a NamedTuple, operators take only the scalars among the fields of this
    inner NamedTuple. These scalars must be its first fields.
    """
    found: list[Field] = []
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        notes = get_args(hint)[1:]
        option = next((x for x in notes if isinstance(x, Option)), None)
        kind = get_args(hint)[0] if option else hint
        if _is_options(kind):
            found += [x for x in fields_of(kind) if x.kind in _SCALARS]
        elif NOT_CARRIED not in notes:
            found.append(Field(name, kind, option))
    return found


def _is_options(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple)


class Carried(Generic[A]):
    """Converts the arguments of a call to the flat list that an operator takes, and back.

    The flat list has tensors first and scalars after the tensors.

    Attributes:
        schema: the arguments in an operator's schema, such as "Tensor layout, SymInt tokens".
        tensors: the number of tensors at the start of the flat list.
        options: the argument names of the scalars that users pass.
    """

    def __init__(self, arguments: Any) -> None:
        carried, own = fields_of(arguments), list(get_type_hints(arguments).values())
        self._class = arguments
        self._options: Any = own[-1] if _is_options(own[-1]) else None
        self._own = len(own) - (self._options is not None)  # the number of fields without options
        self._names = [x.name for x in carried]
        self.schema = ", ".join(x.schema for x in carried)
        self.tensors = sum(x.kind in (Tensor, Tensor | None) for x in carried)
        self._parsed = [(x.public_name, x.name, x.option) for x in carried if x.option is not None]
        self.options = [name for name, _, _ in self._parsed]
        self._agreed = [
            (x.public_name, i)
            for i, x in enumerate(carried)
            if x.kind in _SCALARS and x.name != "strategy"
        ]

    def flat(self, arguments: A) -> Sequence[Any]:
        if self._options is None:
            return arguments
        return (*arguments[:-1], *arguments[-1][: len(self._names) - self._own])

    def restored(self, flat: Sequence[Any]) -> A:
        """Return the arguments as a NamedTuple, given the flat list that an operator received."""
        if self._options is None:
            return self._class(*flat)
        return self._class(*flat[: self._own], self._options(*flat[self._own :]))

    def agreed(self, arguments: A) -> dict[str, object]:
        """Return the scalars that must be equal on all ranks, as a dict from argument names to
        values.
        """
        flat = self.flat(arguments)
        return {name: flat[i] for name, i in self._agreed}

    def of(self, user: Mapping[str, Any], **others: Any) -> A:
        """Return the arguments of a call as a NamedTuple.

        The options are parsed from `user`, and have their defaults if they are missing in `user`.
        `others` has the values of all other fields.
        """
        for name, field, option in self._parsed:
            others[field] = option.parse(name, user.get(name, option.default))
        return self.restored([*map(others.__getitem__, self._names)])
