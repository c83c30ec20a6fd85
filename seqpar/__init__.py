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
from seqpar.tracing import exposure, trace

__all__ = [
    "AllGatherAttention",
    "Layout",
    "RingAttention",
    "Span",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "exposure",
    "make_attention",
    "shift_labels",
    "trace",
    "use_backend",
]
