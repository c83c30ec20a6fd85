"""Choose ranks that are simulated in place of others with the same work.

If all ranks of a group exchange with all others, their messages grow with the square of the ranks.
If all have the same work too, only some nodes are recorded and played. Each other rank is taken to
do what the rank at the same place in the nearest of these nodes does, at the same times.
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
_PLAYED_NODES, _LEAST_PLAYED_RANKS = 4, 16
_MANY_RANKS = 4096  # of which only the first and the last node are played
_TOLERANCE = 0.02  # of the largest rank's tokens and pairs, and of the tokens of short documents


def nearest_stand_ins(cluster: Cluster, ranks: int) -> Ints:
    """Return for each rank the one that stands for it, in one of 2 or 4 evenly spaced nodes.

    If nodes are small there are more, with 16 ranks. Their ranks stand for themselves. The first
    and the last node are among them, because the work at the ends of a sequence differs most. All
    ranks stand for themselves if they do not fill nodes, or if links between nodes also carry other
    nodes' messages: on a torus, and below oversubscribed leaf switches.
    """
    fabric, per_node = cluster.fabric, cluster.devices_per_node
    is_shared = isinstance(fabric, Torus) or (fabric is not None and fabric.oversubscription > 1)
    nodes, played = ranks // per_node, _PLAYED_NODES if ranks <= _MANY_RANKS else 2
    played = max(played, _LEAST_PLAYED_RANKS // per_node)
    if is_shared or ranks % per_node or nodes <= played:
        return np.arange(ranks)
    chosen = np.linspace(0, nodes - 1, played).round().astype(np.int64)
    node, place = np.divmod(np.arange(ranks), per_node)
    nearest = np.abs(node[:, None] - chosen).argmin(1)
    return chosen[nearest] * per_node + place


def has_even_work(geometry: Geometry) -> bool:
    """Return whether all ranks hold parts of the same documents, with the same causal work.

    Documents with up to 2% of the tokens may be on fewer ranks, and up to 2% of the tokens and
    (query, key) pairs of a rank may differ.
    """
    ranks, documents, starts, stops = geometry.all_spans()
    lengths, pairs = stops - starts, (stops * stops - starts * starts) / 2
    for work in (lengths, pairs):
        of_rank = np.bincount(ranks, work, geometry.ranks)
        if np.ptp(of_rank) > _TOLERANCE * of_rank.max():
            return False
    held = np.unique(documents * geometry.ranks + ranks)
    holders = np.bincount(held // geometry.ranks)
    on_fewer = lengths[holders[documents] < geometry.ranks].sum()
    return bool(on_fewer <= _TOLERANCE * geometry.tokens)


def exchange_alike(programs: Iterable[Program]) -> bool:
    """Return whether programs post exchanges of the same names and steps in the same order."""
    orders = {
        tuple((x.channel, x.what, x.step) for x in program.each() if isinstance(x, Post))
        for program in programs
    }
    return len(orders) == 1
