"""seqpar: attention over sequences too long for one device."""

from seqpar.backend import use_backend
from seqpar.checkpointing import SAVED_OPS, checkpoint, save_attention
from seqpar.comm.exchange import Group
from seqpar.comm.heartbeat import PeerError
from seqpar.comm.routing import Routing
from seqpar.layout.labels import shift_labels
from seqpar.layout.layout import Layout
from seqpar.layout.spans import Span
from seqpar.offload import offload
from seqpar.servers.errors import ServersError
from seqpar.servers.pool import ServerPool
from seqpar.simulate.recommending import recommend
from seqpar.softmax.merge import merge
from seqpar.softmax.module import Attention
from seqpar.strategies import (
    AllGatherAttention,
    DisaggregatedAttention,
    LASP2Attention,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    USPAttention,
    make_attention,
)
from seqpar.tracing.exposure import Exposure, exposure
from seqpar.tracing.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "SAVED_OPS",
    "AllGatherAttention",
    "Attention",
    "DisaggregatedAttention",
    "Exposure",
    "Group",
    "LASP2Attention",
    "Layout",
    "PeerError",
    "RingAttention",
    "Routing",
    "ServerPool",
    "ServersError",
    "Span",
    "TokenRingAttention",
    "Trace",
    "USPAttention",
    "UlyssesAttention",
    "__version__",
    "checkpoint",
    "exposure",
    "make_attention",
    "merge",
    "offload",
    "recommend",
    "save_attention",
    "shift_labels",
    "trace",
    "use_backend",
]
