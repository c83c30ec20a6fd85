"""Keep what is derived from an object with the object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """The results that have been derived from an object, its owner, by key.

    It is freed with the owner, which must not change. A key has all that the result depends on
    besides the owner; the first element of a tuple names what is derived, so that keys of different
    uses never collide.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result that has this key, made by `build()` when it was first asked for."""
        if key not in self._results:
            self._results[key] = build()
        return self._results[key]
