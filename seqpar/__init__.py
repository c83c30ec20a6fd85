"""seqpar: attention over sequences too long for one device.

Start with `strategies/`, which has one file for each strategy.
"""

import seqpar.core.checkout  # before all that imports seqpar.kernels

# isort: split
# Public packages, which users reach as `seqpar.balance` and so on after `import seqpar`.
import seqpar.balance
import seqpar.costs
import seqpar.elastic
import seqpar.integrations.flash_attn
import seqpar.integrations.mask_functions
import seqpar.layout.plot
import seqpar.masks
import seqpar.memory
import seqpar.parity
import seqpar.servers
import seqpar.simulate  # noqa: F401
from seqpar.attention.backend import use_backend
from seqpar.auto.module import AutoAttention
from seqpar.comm.faults.heartbeat import PeerError
from seqpar.comm.messages.comm import Group
from seqpar.comm.routing.routing import Routing
from seqpar.halo.functions import causal_conv1d, token_shift
from seqpar.integrations.context_parallel import context_parallel
from seqpar.integrations.sdpa import sdpa
from seqpar.layout.labels import shift_labels
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.layout.spans import Span
from seqpar.memory.checkpointing import SAVED_OPS, checkpoint, save_attention
from seqpar.memory.offload import offload
from seqpar.servers.cache.server_cache import ServerCache
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.wire.request import ServersError
from seqpar.simulate.recommendations.recommending import recommend
from seqpar.softmax.compute.merge import merge
from seqpar.softmax.module import Attention
from seqpar.softmax.sharded_cache import ShardedCache
from seqpar.strategies import (
    AllGatherAttention,
    DisaggregatedAttention,
    LASP2Attention,
    MeshAttention,
    RecurrentAttention,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    USPAttention,
    best_mesh,
    make_attention,
)
from seqpar.tracing.exposure import Exposure, exposure
from seqpar.tracing.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "SAVED_OPS",
    "AllGatherAttention",
    "Attention",
    "AutoAttention",
    "DisaggregatedAttention",
    "Exposure",
    "Group",
    "LASP2Attention",
    "Layout",
    "Mask",
    "MeshAttention",
    "PeerError",
    "RecurrentAttention",
    "RingAttention",
    "Routing",
    "ServerCache",
    "ServerPool",
    "ServersError",
    "ShardedCache",
    "Span",
    "TokenRingAttention",
    "Trace",
    "USPAttention",
    "UlyssesAttention",
    "__version__",
    "best_mesh",
    "causal_conv1d",
    "checkpoint",
    "context_parallel",
    "exposure",
    "make_attention",
    "merge",
    "offload",
    "recommend",
    "save_attention",
    "sdpa",
    "shift_labels",
    "token_shift",
    "trace",
    "use_backend",
]
