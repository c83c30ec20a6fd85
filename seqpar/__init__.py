"""seqpar: attention over sequences too long for one device."""

from seqpar.attend import use_backend
from seqpar.checkpointing import checkpoint, save_attention
from seqpar.layout import Layout, Span, shift_labels
from seqpar.liveness import PeerError
from seqpar.strategies import (
    AllGatherAttention,
    LASP2Attention,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    USPAttention,
    make_attention,
)
from seqpar.tracing import exposure, trace

__all__ = [
    "AllGatherAttention",
    "LASP2Attention",
    "Layout",
    "PeerError",
    "RingAttention",
    "Span",
    "TokenRingAttention",
    "USPAttention",
    "UlyssesAttention",
    "checkpoint",
    "exposure",
    "make_attention",
    "save_attention",
    "shift_labels",
    "trace",
    "use_backend",
]
