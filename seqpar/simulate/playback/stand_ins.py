"""Simulate only some ranks of a large group in which all ranks have the same work.

If each rank of a group sends messages to all other ranks, the number of messages grows with the
square of the number of ranks, and simulating all of them takes too long. If all ranks also have the
same work, only the ranks of some nodes are simulated. Each rank of the remaining nodes has a
*stand-in*: the rank with the same index in the nearest simulated node. A rank is assumed to do the
same as its stand-in, at the same times.

A *program* is the list of one rank's computations, messages and waits. To simulate a rank is to
*record* its program, by running its code on tensors without data, and to *play* the program, which
gives the times of its actions.
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
# Up to this number of ranks, four nodes are played; in larger groups, two.
_MAX_RANKS_OF_FOUR_NODES = 4096
_MIN_PLAYED_RANKS = 16  # if nodes are small, more nodes are played until they have this many ranks
_TOLERANCE = 0.02  # the fraction by which ranks can differ in `has_even_work`
# The strategies and transports whose ranks all begin each exchange at the same time. With others,
# ranks wait for each other in turn, or have different work.
_IN_STEP = ("ulysses", "ring", "all_gather", "usp", "mesh")


def choose_stand_ins(strategy: str, geometry: Geometry, cluster: Cluster) -> Ints:
    """Return (ranks,): for each rank, the rank that is simulated in its place, which is its
    stand-in.

    `strategy` is a softmax strategy, or the transport of linear layers. In the following cases, all
    ranks are simulated, and each rank is its own stand-in:

    * The group is small, or the work of its ranks is uneven.
    * The ranks of this strategy do not begin each exchange at the same time.
    * The number of nodes is too small, or some devices of a node have no rank.
    * Cores send the messages.
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
    # The first and the last node are always played, because with zigzag they hold the ends and the
    # middle of a document.
    chosen = np.linspace(0, nodes - 1, played).round().astype(np.int64)
    node, place = np.divmod(np.arange(ranks), per_node)
    nearest = np.abs(node[:, None] - chosen).argmin(1)
    return chosen[nearest] * per_node + place


def has_even_work(geometry: Geometry) -> bool:
    """Return whether all ranks hold tokens of the same documents, with the same causal work.

    Two deviations are allowed. Documents that are not on all ranks may have up to 2% of all tokens
    together. Two ranks may differ by up to 2% in their numbers of tokens and of (query, key) pairs.
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
    """Return whether all programs post the same exchanges in the same order.

    The peers and bytes of the exchanges can differ.
    """
    orders = {
        tuple((x.number, x.channel, x.what, x.step) for x in program.each() if isinstance(x, Post))
        for program in programs
    }
    return len(orders) == 1
