"""One file a strategy, each readable beside its paper."""

from typing import Any

from seqpar.comm import Group
from seqpar.strategies.all_gather import AllGatherAttention
from seqpar.strategies.base import Attention
from seqpar.strategies.linear_attention import LASP2Attention
from seqpar.strategies.ring import RingAttention
from seqpar.strategies.token_ring import TokenRingAttention
from seqpar.strategies.ulysses import Ulysses, UlyssesAttention
from seqpar.strategies.usp import OUTER, USP, USPAttention

STRATEGIES: dict[str, type[Attention]] = {
    **OUTER,
    Ulysses.name: UlyssesAttention,
    USP.name: USPAttention,
}


def make_attention(name: str, group: Group, check_ranks: bool = False, deterministic: bool = True, **options: Any) -> Attention:
    """An attention module by its strategy's name: "ring", "ulysses", "all_gather", "token_ring" or, on a 2-D mesh, "usp".

    `options` are the strategy's own, such as `partial_dtype` of "token_ring"; its class says which there are.
    """
    if name not in STRATEGIES:
        raise ValueError(f"name must be one of {sorted(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](group, check_ranks=check_ranks, deterministic=deterministic, **options)


__all__ = [
    "STRATEGIES",
    "AllGatherAttention",
    "Attention",
    "LASP2Attention",
    "RingAttention",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "make_attention",
]
