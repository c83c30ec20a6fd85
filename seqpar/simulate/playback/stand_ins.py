"""Choose ranks that are simulated in place of others with the same work.

If all ranks of a group exchange with all others, the number of messages grows with the square of
the ranks. If they also have the same work, only some nodes are recorded and played. Every other
rank does what the rank at the same place in the nearest of these nodes does, at the same times.
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
_MAX_RANKS_OF_FOUR_NODES = 4096  # of more ranks, two nodes are played
_MIN_PLAYED_RANKS = 16  # with small nodes, more nodes are played
_TOLERANCE = 0.02  # relative; see `has_even_work`
# Softmax strategies, and transports of linear layers, whose ranks begin each exchange together. In
# others, ranks wait for each other in turn, or have different work.
_IN_STEP = ("ulysses", "ring", "all_gather", "usp", "mesh")


def choose_stand_ins(strategy: str, geometry: Geometry, cluster: Cluster) -> Ints:
    """Return (ranks,) each rank's stand-in: itself, unless a large group has even work.

    `strategy` is a softmax strategy, or the transport of linear layers. All ranks are played if
    ranks of this strategy do not keep step, if there are few nodes or ranks do not fill them, if
    cores move the messages, or if links between nodes also carry other nodes' messages: on a torus,
    with rails, and below oversubscribed leaf switches.
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
    # The first node and the last one are among them: in zigzag they hold a document's ends and its
    # middle.
    chosen = np.linspace(0, nodes - 1, played).round().astype(np.int64)
    node, place = np.divmod(np.arange(ranks), per_node)
    nearest = np.abs(node[:, None] - chosen).argmin(1)
    return chosen[nearest] * per_node + place


def has_even_work(geometry: Geometry) -> bool:
    """Return whether all ranks hold parts of the same documents, with the same causal work.

    Documents with up to 2% of all tokens together may be on fewer ranks. Tokens, and (query, key)
    pairs, of ranks may differ by up to 2%.
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
    """Return whether programs post the same exchanges in the same order, but for peers and bytes.

    A message to or from a rank that is not played waits for its stand-in's exchange of the same
    number.
    """
    orders = {
        tuple((x.number, x.channel, x.what, x.step) for x in program.each() if isinstance(x, Post))
        for program in programs
    }
    return len(orders) == 1
