"""Know whether a call is traced, and keep torch.compile out of functions it cannot trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from seqpar.core.torch_private import (
    has_fake_mode,
    mark_constant,
    mark_disabled,
    never_compiled,
    real_object,
)

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
R = TypeVar("R")


@never_compiled  # compiled by itself, after a graph break, it would return true to untraced callers
def is_traced() -> bool:
    """Return whether torch.compile or torch.export traces the caller.

    `torch.compiler.is_compiling` does not tell: torch 2.13 and newer return true from it in all
    threads while one of them compiles, so that other threads' calls would skip their checks.
    """
    if torch.compiler.is_dynamo_compiling():  # a constant of the graph, and false outside of it
        return True
    # torch.export runs a function without tracing its code, with fake tensors. Its flag is the
    # process's too, but the mode that makes the fake tensors is the thread's.
    return torch.compiler.is_exporting() and has_fake_mode()


def outside_graphs(function: F, reason: str | None = None) -> F:
    """Mark a function for which torch.compile breaks its graph; with `fullgraph` it refuses.

    Nothing that the function calls is compiled either. The refusal gives the `reason`. Default: the
    function cannot be traced. Unlike `torch.compiler.disable`, this does not import the compiler,
    which takes seconds.
    """
    if reason is None:
        where = "call it outside of the compiled function"
        reason = f"seqpar: {function.__qualname__} cannot be traced: {where}"
    mark_disabled(function, reason)
    return never_compiled(function)


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile calls once, while tracing, instead of tracing it.

    The graph guards on the identity of the arguments and contains the result as a constant.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*map(real_object, args), **kwargs)

    mark_constant(wrapper)
    return wrapper
