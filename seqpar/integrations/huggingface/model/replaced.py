"""Set attributes of a module that take precedence over the attributes of its class, and remove them
later.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Replaced:
    """An attribute that was set on a module. Until `remove` is called, it takes precedence over the
    attribute of the module's class.
    """

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
