"""The one list of strategies: what `make_attention`, tests, examples and docs go by.

A strategy's file registers its module; `seqpar.strategies` imports the file.
"""

from __future__ import annotations

from typing import Any, TypeVar

from seqpar.comm.messages.exchange import Group
from seqpar.core.arguments import Deterministic, shown
from seqpar.linear.module import LinearAttention
from seqpar.recurrent.module import RecurrentModule
from seqpar.servers.pool.pool import ServerPool
from seqpar.softmax.module import Attention

SOFTMAX: dict[str, type[Attention]] = {}
LINEAR: dict[str, type[LinearAttention]] = {}
RECURRENT: dict[str, type[RecurrentModule]] = {}
# What is no strategy, but chooses among them: `seqpar.auto.module` adds itself, which can import
# this file while this one cannot import it.
CHOOSERS: dict[str, type[Attention]] = {}

M = TypeVar("M", type[Attention], type[LinearAttention], type[RecurrentModule])


def register(module: M) -> M:
    """Add a strategy's module to the list, under the strategy's name; use it as a decorator."""
    if issubclass(module, Attention):
        SOFTMAX[module.strategy.name] = module
    elif issubclass(module, LinearAttention):
        LINEAR[module.strategy.name] = module
    else:
        RECURRENT[module.strategy.name] = module
    return module


def make_attention(
    name: str,
    group: Group | ServerPool,
    check_ranks: bool = False,
    deterministic: Deterministic = True,
    **options: object,
) -> Attention:
    """Make a softmax attention module by its strategy's name.

    `name` is "ring", "ulysses", "all_gather", "token_ring", "disaggregated" or, on a 2-D mesh,
    "mesh" or "usp"; `group` is what its module takes, "disaggregated" also a `ServerPool`. "auto"
    makes an `AutoAttention`, which chooses among them. `options` are the strategy's, such as
    `partial_dtype` of "token_ring", which the docstring of its module lists. For linear attention,
    make a `LASP2Attention` or a `RecurrentAttention`. An unknown name or an ill-typed option raises
    a ValueError, and an option that the strategy does not have a TypeError that lists those it has.
    """
    known = attention_modules()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name must be one of {sorted(known)}, got {shown(name)}")
    module: Any = known[name]  # of which one takes more than groups
    return module(group, check_ranks=check_ranks, deterministic=deterministic, **options)


def attention_modules() -> dict[str, type[Attention]]:
    """Return the modules that `make_attention` makes, by name: strategies, and what chooses."""
    return SOFTMAX | CHOOSERS
