"""Tell a recorder about calls that torch does not see, such as launches of kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Observer(threading.local):
    """What observes the steps of a thread.

    Attributes:
        step: called with the function of a step and its arguments, and returns the function's
            result. None: nothing observes.
    """

    step: Callable[..., Any] | None = None


OBSERVER = Observer()


def step(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`. If this thread's steps are observed, the call is a step.

    The function may depend only on its arguments.
    """
    observe = OBSERVER.step
    if observe is None:
        return function(*arguments)
    result: T = observe(function, *arguments)
    return result
