"""Private names of other libraries, each listed with the reason why seqpar uses it.

A release of a library may rename a private name. Each table therefore looks a name up at the first
use of the name. If the library does not have the name, the table raises a RuntimeError that
contains the name and the library's version. A test compares the tables with the private names that
the code uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple

from seqpar.core.installed import installed_version


class Use(NamedTuple):
    """Why seqpar uses a private name, and a version of the library that has the name.

    Attributes:
        since: the first version of the library that is known to have the name.
        why: what seqpar does with the name.
        named_in: for an attribute that not all objects have, a function of the library that uses
            the attribute. The function's code shows whether the library still has the name.
    """

    since: str
    why: str
    named_in: str = ""


class PrivateNames:
    """The private names of one library.

    Attributes:
        library: the library's name, as pip and `import` know it.
        names: the private names with their modules, such as "torch.Tensor._base".
        attributes: the private names of attributes that objects have, but not their classes.
    """

    def __init__(
        self, library: str, names: Mapping[str, Use], attributes: Mapping[str, Use] | None = None
    ) -> None:
        self.library, self.names, self.attributes = library, names, attributes or {}
        self._known: dict[str, Any] = {}

    def missing(self) -> dict[str, str]:
        """Return the names that the installed library does not have, each with the reason for its
        use.
        """
        lacking = {name: use.why for name, use in self.names.items() if self.find(name) is None}
        for name, use in self.attributes.items():
            if use.named_in and not self._is_named(name):
                lacking[name] = use.why
        return lacking

    def check(self) -> None:
        """Raise a RuntimeError if the library does not have one of `names`."""
        for name in self.names:
            self.get(name)

    def get(self, name: str) -> Any:
        """Return the object with a full name, such as "torch.Tensor._base". Raise a RuntimeError if
        the library does not have the name.
        """
        if name not in self._known:
            found = self.find(name)
            if found is None:
                raise self._error(name, self.names[name])
            self._known[name] = found
        return self._known[name]

    def find(self, name: str) -> Any | None:
        """Return the object with a full name, or None if the library does not have the name. If
        necessary, the object's module is imported.
        """
        path, *parts = name.split(".")
        found = import_module(path)
        for part in parts:
            path = f"{path}.{part}"
            try:
                found = getattr(found, part)
            except AttributeError:
                try:
                    found = import_module(path)
                except ImportError:
                    return None
        return found

    def read(self, x: object, *names: str) -> Any:
        """Return the value of the first attribute in `names` that `x` has.

        The first name is the attribute's usual name. All further names are its names in other
        versions of the library. Raises a RuntimeError if `x` has none of the attributes.
        """
        for name in names:
            try:
                return getattr(x, name)
            except AttributeError:
                pass
        full = f"{type(x).__module__}.{type(x).__qualname__}.{' or '.join(names)}"
        raise self._error(full, self._use(names[0]))

    def read_if_set(self, x: object, name: str, default: Any) -> Any:
        """Return the value of an attribute of `x`, or the default if `x` does not have the
        attribute.

        Raises a RuntimeError if the library no longer uses the name.
        """
        self.check_named(name)
        return getattr(x, name, default)

    def check_named(self, name: str) -> None:
        """Raise a RuntimeError if the library no longer uses the name of an attribute
        (`Use.named_in`).
        """
        if name not in self._known:
            if not self._is_named(name):
                raise self._error(name, self.attributes[name])
            self._known[name] = True

    def _is_named(self, name: str) -> bool:
        function = self.find(self.attributes[name].named_in)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return code is not None and name in _names_in(code)

    def _use(self, attribute: str) -> Use:
        if attribute in self.attributes:
            return self.attributes[attribute]
        return next(x for name, x in self.names.items() if name.endswith(f".{attribute}"))

    def _error(self, name: str, use: Use) -> RuntimeError:
        here = f"{self.library} {self._installed} has no {name}"
        known = f"{self.library} had it in {use.since}"
        return RuntimeError(f"{here} ({known}), which seqpar uses: {use.why}")

    @cached_property
    def _installed(self) -> str:
        return installed_version(self.library) or "of an unknown version"


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in a function's code, and in the code of functions that are defined
    in the function.
    """
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)
