"""Choose some ranks to simulate in place of all ranks that have the same work.

If all ranks of a group exchange with all other ranks, the number of messages grows with the square
of the number of ranks. If all ranks also have the same work, only some nodes are recorded and
played. Every rank of the remaining nodes has a *stand-in*: the rank with the same index in the
nearest played node. The simulation assumes that a rank does what its stand-in does, at the same
times.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Torus
from seqpar.layout.geometry import Geometry
from seqpar.simulate.recording.program import Post, Program

MAX_RANKS_PLAYED_WHOLE = 128
_MAX_RANKS_OF_FOUR_NODES = 4096  # four nodes are played up to this number of ranks, else two
_MIN_PLAYED_RANKS = 16  # if nodes are small, more nodes are played, to reach this number
_TOLERANCE = 0.02  # fraction by which ranks may differ in `has_even_work`
# Softmax strategies, and transports of linear layers, whose ranks begin each exchange together.
# With other strategies and transports, ranks wait for each other in turn, or have different work.
_IN_STEP = ("ulysses", "ring", "all_gather", "usp", "mesh")


def choose_stand_ins(strategy: str, geometry: Geometry, cluster: Cluster) -> Ints:
    """Return (ranks,) each rank's stand-in, which is the rank itself if all ranks are played.

    `strategy` is a softmax strategy, or the transport of linear layers. All ranks are played if the
    group is small, if the ranks have uneven work, and in these cases:

    * Ranks of this strategy do not begin exchanges together.
    * There are few nodes, or ranks do not fill them.
    * Cores move the messages.
    * Links between nodes also carry messages of other nodes: on a torus, with rails, and below
      oversubscribed leaf switches.
    """
    ranks, per_node, fabric = geometry.ranks, cluster.devices_per_node, cluster.fabric
    nodes = ranks // per_node
    played = 4 if ranks <= _MAX_RANKS_OF_FOUR_NODES else 2
    played = max(played, -(-_MIN_PLAYED_RANKS // per_node))
    links_are_shared = fabric is not None and (
        isinstance(fabric, Torus) or fabric.rails or fabric.oversubscription > 1
    )
    if (
        ranks <= MAX_RANKS_PLAYED_WHOLE
        or strategy not in _IN_STEP
        or not cluster.overlaps
        or links_are_shared
        or ranks % per_node
        or nodes <= played
        or not has_even_work(geometry)
    ):
        return np.arange(ranks)
    # The first node and the last node are always played: in zigzag, they hold a document's ends and
    # its middle.
    chosen = np.linspace(0, nodes - 1, played).round().astype(np.int64)
    node, place = np.divmod(np.arange(ranks), per_node)
    nearest = np.abs(node[:, None] - chosen).argmin(1)
    return chosen[nearest] * per_node + place


def has_even_work(geometry: Geometry) -> bool:
    """Return whether all ranks hold tokens of the same documents, with the same causal work.

    Some documents may be on fewer ranks if together they have at most 2% of all tokens. The ranks'
    numbers of tokens, and of (query, key) pairs, may differ by up to 2%.
    """

    def build() -> bool:
        tokens, pairs = np.zeros((2, geometry.ranks))
        holders = np.zeros(geometry.lengths.size, np.int64)
        for rank in range(geometry.ranks):
            documents, starts, stops = geometry.cut.columns(geometry.cu_seqlens, rank)
            tokens[rank] = (stops - starts).sum()
            pairs[rank] = (stops * stops - starts * starts).sum() / 2
            holders[np.unique(documents)] += 1
        differ = any(np.ptp(x) > _TOLERANCE * x.max() for x in (tokens, pairs))
        on_fewer = geometry.lengths[holders < geometry.ranks].sum()
        return not differ and bool(on_fewer <= _TOLERANCE * geometry.tokens)

    return geometry.derived(("even work",), build)


def exchange_alike(programs: Iterable[Program]) -> bool:
    """Return whether programs post the same exchanges in order, except for peers and bytes.

    Stand-ins are possible only then: a rank that is not played begins its exchange number n when
    its stand-in begins exchange number n.
    """
    orders = {
        tuple((x.number, x.channel, x.what, x.step) for x in program.each() if isinstance(x, Post))
        for program in programs
    }
    return len(orders) == 1
