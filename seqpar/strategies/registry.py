"""The table of all strategies. `make_attention`, tests, examples and the documentation use it."""

from __future__ import annotations

from typing import Any, TypeVar

from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import Deterministic, shown
from seqpar.linear.module import LinearModule
from seqpar.servers.pool.pool import ServerPool
from seqpar.softmax.module import Attention

SOFTMAX: dict[str, type[Attention]] = {}
LINEAR: dict[str, type[LinearModule]] = {}
# Modules that choose a strategy themselves. `seqpar.auto.module` adds its module here, because this
# file cannot import that file.
CHOOSERS: dict[str, type[Attention]] = {}

M = TypeVar("M", type[Attention], type[LinearModule])


def register(module: M) -> M:
    """Register a module under the name of its strategy. Use this function as a decorator."""
    if issubclass(module, Attention):
        SOFTMAX[module.strategy.name] = module
    else:
        LINEAR[module.strategy.name] = module
    return module


def make_attention(
    name: str,
    group: Group | ServerPool,
    check_ranks: bool = False,
    deterministic: Deterministic = True,
    **options: object,
) -> Attention:
    """Make a softmax attention module from the name of its strategy.

    For linear or recurrent attention, make a `LASP2Attention` or a `RecurrentAttention` instead.

    Args:
        name: "ring", "ulysses", "all_gather", "token_ring", "disaggregated", "auto", or, on a 2-D
            mesh, "mesh" or "usp". "auto" makes an `AutoAttention`, which needs the extra `plan`. On
            a new machine, it measures the machine for about 15 s. It may measure candidates during
            calls.
        group: a process group or a DeviceMesh. "disaggregated" also takes a `ServerPool`.
        check_ranks, deterministic: as in `Attention`.
        options: the options of the strategy, such as `partial_dtype` for "token_ring". The
            docstring of the strategy's module lists them.

    Raises:
        ValueError: if the name is unknown, or an option has a wrong value.
        TypeError: if the strategy does not have an option; the message lists its options.
    """
    known = attention_modules()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name must be one of {sorted(known)}, got {shown(name)}")
    # Not `type[Attention]`, because DisaggregatedAttention also takes a pool.
    module: Any = known[name]
    return module(group, check_ranks=check_ranks, deterministic=deterministic, **options)


def attention_modules() -> dict[str, type[Attention]]:
    """Return all modules that `make_attention` can make, by name."""
    return SOFTMAX | CHOOSERS
