"""Run a module's own forward with other functions under some of its global names.

The forward keeps its code, closures and decorators. Only this module's copy of it reads the other
functions: neither the file nor the class changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Replaced:
    """An attribute that a module has itself, in place until `remove`."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value
        self._known = vars(module).get(name)
        object.__setattr__(module, name, value)

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)
        if self._known is not None:
            object.__setattr__(self._module, self._name, self._known)


Removable = RemovableHandle | Replaced  # a change of a model, undone by `remove`


class Overlay(Replaced):
    """A forward that calls other functions, until `remove`, within `around(own, module, …)`."""

    def __init__(
        self,
        module: nn.Module,
        functions: Mapping[str, Any],
        around: Callable[..., Any] | None = None,
    ) -> None:
        forward = type(module).forward
        assert isinstance(forward, FunctionType)
        own = with_globals(forward, functions)

        def within(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            assert around is not None
            return around(own, module, *args, **kwargs)

        made = own if around is None else within
        super().__init__(module, "forward", MethodType(made, module))

    def remove(self) -> None:
        """Restore the forward before, unless the module has been given another forward since."""
        if vars(self._module).get("forward") is self._value:
            super().remove()


def check_forward(module: nn.Module, names: Iterable[str]) -> None:
    found = type(module).__name__
    if "forward" in vars(module):
        raise ValueError(f"model must have its own forwards, and a {found} has another one")
    if missing := sorted(set(names) - named_in(module)):
        reason = f"a {found} does not call {', '.join(missing)}"
        raise ValueError(f"model must be of a release of transformers that seqpar knows: {reason}")
    if not _holds_what_it_decorates(type(module).forward):
        reason = f"a decorator of a {found}'s forward finds it elsewhere than in a closure"
        raise ValueError(f"model must have forwards that can be copied: {reason}")


def named_in(module: nn.Module) -> set[str]:
    """Return the global names that a forward reads, without those in its decorators."""
    function = inspect.unwrap(type(module).forward)
    return set(function.__code__.co_names) if isinstance(function, FunctionType) else set()


def with_globals(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function, in its decorators, that reads other values for some globals."""
    inner = getattr(function, "__wrapped__", None)
    cells, names = function.__closure__, function.__globals__
    if inner is None:
        # torch.compile would look names up in a module of that name.
        names = {name: x for name, x in names.items() if name != "__name__"} | dict(replaced)
    else:
        made = with_globals(inner, replaced)
        cells = tuple(CellType(made) if _has(cell, inner) else cell for cell in cells or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))
    if inner is not None:
        copy.__dict__["__wrapped__"] = made
    return copy


def _holds_what_it_decorates(function: object) -> bool:
    """Return whether every decorator keeps the function that it wraps in a closure cell."""
    if not isinstance(function, FunctionType):
        return False
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return True
    held = any(_has(cell, inner) for cell in function.__closure__ or ())
    return held and _holds_what_it_decorates(inner)


def _has(cell: CellType, content: object) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # it is empty
        return False
