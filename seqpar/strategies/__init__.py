"""The strategies, one file per published method. The import of this package registers all
strategies.

Start with `ring.py`, the shortest strategy. `registry.py` has the function `make_attention`.
"""

from seqpar.strategies.all_gather import AllGatherAttention
from seqpar.strategies.disaggregated import DisaggregatedAttention
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.mesh import MeshAttention, best_mesh
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
    "MeshAttention",
    "RecurrentAttention",
    "RingAttention",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "best_mesh",
    "make_attention",
]
