"""One file a strategy, each readable beside its paper."""

from seqpar.comm import Group
from seqpar.strategies.all_gather import AllGatherAttention
from seqpar.strategies.base import Attention
from seqpar.strategies.ring import RingAttention
from seqpar.strategies.ulysses import UlyssesAttention

STRATEGIES: dict[str, type[Attention]] = {
    attention.strategy.name: attention for attention in (AllGatherAttention, RingAttention, UlyssesAttention)
}


def make_attention(name: str, group: Group, check_ranks: bool = False, deterministic: bool = True) -> Attention:
    """An attention module by its strategy's name: "ring", "ulysses" or "all_gather"."""
    if name not in STRATEGIES:
        raise ValueError(f"name must be one of {sorted(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](group, check_ranks, deterministic)


__all__ = ["STRATEGIES", "AllGatherAttention", "Attention", "RingAttention", "UlyssesAttention", "make_attention"]
