"""seqpar: attention over sequences too long for one device."""

from seqpar.attend import use_backend
from seqpar.layout import Layout, Span, shift_labels
from seqpar.liveness import PeerError
from seqpar.strategies import AllGatherAttention, RingAttention, UlyssesAttention, make_attention

__all__ = [
    "AllGatherAttention",
    "Layout",
    "PeerError",
    "RingAttention",
    "Span",
    "UlyssesAttention",
    "make_attention",
    "shift_labels",
    "use_backend",
]
