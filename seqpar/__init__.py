"""seqpar: attention over sequences too long for one device."""

from seqpar.attend import use_backend
from seqpar.layout import Layout, Span, shift_labels
from seqpar.strategies import (
    AllGatherAttention,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    USPAttention,
    make_attention,
)

__all__ = [
    "AllGatherAttention",
    "Layout",
    "RingAttention",
    "Span",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "make_attention",
    "shift_labels",
    "use_backend",
]
