"""Keep torch.compile out of functions that it cannot trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from seqpar.core.torch_private import compiler_is_loaded, mark_constant, mark_disabled, real_object

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R], reason: str | None = None) -> Callable[P, R]:
    """Return a function for which torch.compile breaks its graph; with `fullgraph` it refuses.

    The refusal gives the `reason`. Default: the function works on numpy arrays. Unlike
    `torch.compiler.disable`, this does not import the compiler, which takes seconds.
    """
    if reason is None:
        where = "call it outside of the graph"
        reason = f"seqpar: {function.__qualname__} works on numpy arrays: {where}"
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compiler_is_loaded():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=reason))
        return disabled[0](*args, **kwargs)

    mark_disabled(wrapper, reason)
    return wrapper


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile calls once, while tracing, instead of tracing it.

    The graph guards on the identity of the arguments and contains the result as a constant.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*map(real_object, args), **kwargs)

    mark_constant(wrapper)
    return wrapper
