"""Set attributes of a module in place of those of its class, and undo this later."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Replaced:
    """An attribute that is set on a module until `remove`."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value
        self._known = vars(module).get(name)
        object.__setattr__(module, name, value)

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)
        if self._known is not None:
            object.__setattr__(self._module, self._name, self._known)


Removable = RemovableHandle | Replaced  # a change of a model, undone by `remove`
