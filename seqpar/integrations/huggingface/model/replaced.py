"""Set attributes of a module in place of those of its class, and undo this later."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Replaced:
    """An attribute of a module that replaces the one of its class until `remove`."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value
        self._known = vars(module).get(name)
        object.__setattr__(module, name, value)

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)
        if self._known is not None:
            object.__setattr__(self._module, self._name, self._known)


class Removable(Protocol):
    """A change of a model, undone by `remove`."""

    def remove(self) -> None: ...
