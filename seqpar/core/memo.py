"""Keep what is derived from an object with the object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MISSING = object()
# Of what may be other in each call, such as a scale or prefixes, so many are kept with a layout.
MAX_KEPT_SETTINGS = 32


class Memo:
    """The results that have been derived from an object, its owner, by key.

    It is freed with the owner, which must not change. A key has all that the result depends on
    besides the owner; the first element of a tuple names what is derived, so that keys of different
    uses never collide.
    """

    def __init__(self, most: int | None = None) -> None:
        """Keep at most so many results, the newest; by default all."""
        self._results: dict[Hashable, Any] = {}
        self._most = most

    def __call__(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result that has this key, made by `build()` when it was first asked for."""
        result: T = self._results.get(key, _MISSING)
        if result is _MISSING:
            result = self._results[key] = build()
            if self._most is not None:
                for old in list(self._results)[: -self._most]:
                    self._results.pop(old, None)  # another thread may have dropped it
        return result
