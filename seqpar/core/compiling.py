"""Find out whether a call is traced, and keep torch.compile out of functions that it cannot
trace.
"""

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


# after a graph break, it would be compiled by itself, and return true to callers that are not
# traced
@never_compiled
def is_traced() -> bool:
    """Return whether torch.compile or torch.export traces the caller.

    Unlike `torch.compiler.is_compiling`, this function returns False in all threads that do not
    compile.
    """
    # a constant of the graph, and false outside of the graph
    if torch.compiler.is_dynamo_compiling():
        return True
    # torch.export runs a function with fake tensors, without tracing its code. Its flag also
    # belongs to the process, but the mode that makes the fake tensors belongs to the thread.
    return torch.compiler.is_exporting() and has_fake_mode()


def outside_graphs(function: F, reason: str | None = None) -> F:
    """Mark a function at which torch.compile breaks the graph, or refuses with `fullgraph`.

    Functions that `function` calls are also not compiled. With `fullgraph`, the error of
    torch.compile states the `reason`, by default that the function cannot be traced. Unlike
    `torch.compiler.disable`, this function does not import the compiler, which takes seconds.
    """
    if reason is None:
        where = "call it outside of the compiled function"
        reason = f"seqpar: {function.__qualname__} cannot be traced: {where}"
    mark_disabled(function, reason)
    return never_compiled(function)


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile calls once while it traces, instead of tracing it.

    The graph guards on the identity of the arguments and contains the result as a constant.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*map(real_object, args), **kwargs)

    mark_constant(wrapper)
    return wrapper
