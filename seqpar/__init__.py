"""seqpar: attention over sequences too long for one device."""

from seqpar.attend import use_backend
from seqpar.checkpoint import checkpoint, save_attention
from seqpar.layout import Layout, Span, shift_labels
from seqpar.strategies import AllGatherAttention, RingAttention, UlyssesAttention, make_attention

__all__ = [
    "AllGatherAttention",
    "Layout",
    "RingAttention",
    "Span",
    "UlyssesAttention",
    "checkpoint",
    "make_attention",
    "save_attention",
    "shift_labels",
    "use_backend",
]
