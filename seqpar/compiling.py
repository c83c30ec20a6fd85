"""Keep torch.compile out of functions that it cannot trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile breaks its graph for, and with `fullgraph` refuses.

    `torch.compiler.disable` alone would do, if it did not import the compiler, which takes seconds,
    for those who compile nothing.
    """
    reason = f"seqpar: {function.__qualname__} works on numpy arrays: call it outside of the graph"
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=reason))
        return disabled[0](*args, **kwargs)

    # What torch.compiler.disable() sets on functions, and dynamo reads before it traces into one
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return wrapper
