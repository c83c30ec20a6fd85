"""Results that are derived from an object and kept with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MISSING = object()
# The number of settings that a layout keeps, if they may be different in every call, such as a
# scale or prefixes.
MAX_KEPT_SETTINGS = 32


LOCAL = "local"  # begins the key of a result that has no meaning in other processes


class Memo:
    """A cache of results that were derived from one object, the owner of the memo.

    The owner must not change, and the memo is freed with its owner. A key contains everything else
    on which the result depends. The first element of a key names the result, so that keys of
    different uses never collide. Results whose keys begin with `LOCAL` are not pickled.
    """

    def __init__(self, most: int | None = None) -> None:
        """Keep the newest `most` results, or all results if `most` is None."""
        self._results: dict[Hashable, Any] = {}
        self._most = most

    def __call__(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result for a key. The first call with the key makes the result with
        `build()`.
        """
        result: T = self._results.get(key, _MISSING)
        if result is _MISSING:
            result = self._results.setdefault(key, build())  # another thread may have been first
            if self._most is not None:
                for old in list(self._results)[: -self._most]:
                    self._results.pop(old, None)  # another thread may have dropped it
        return result

    def __contains__(self, key: Hashable) -> bool:
        return key in self._results

    def __getstate__(self) -> dict[str, object]:
        sent = {
            key: result
            for key, result in list(self._results.items())  # other threads may add results
            if not (isinstance(key, tuple) and key[:1] == (LOCAL,))
        }
        return {**vars(self), "_results": sent}

    def update(self, other: Memo) -> None:
        """Add results of another memo for keys that are not in this memo.

        A result of this memo is kept. If it is a memo, or has a memo as its attribute `derived`,
        this inner memo is updated in the same way.
        """
        for key, result in list(other._results.items()):
            known = self._results.setdefault(key, result)
            memo, more = (getattr(x, "derived", x) for x in (known, result))
            if memo is not more and isinstance(memo, Memo) and isinstance(more, Memo):
                memo.update(more)
