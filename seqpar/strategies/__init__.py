"""The strategies, one file a paper. Importing this package registers them all."""

from seqpar.strategies.all_gather import AllGatherAttention
from seqpar.strategies.disaggregated import DisaggregatedAttention
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.recurrent import RecurrentAttention
from seqpar.strategies.registry import make_attention
from seqpar.strategies.ring import RingAttention
from seqpar.strategies.token_ring import TokenRingAttention
from seqpar.strategies.ulysses import UlyssesAttention
from seqpar.strategies.usp import USPAttention

__all__ = [
    "AllGatherAttention",
    "DisaggregatedAttention",
    "LASP2Attention",
    "RecurrentAttention",
    "RingAttention",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "make_attention",
]
