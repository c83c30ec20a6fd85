"""Layouts with equal numbers of tokens per rank, for layers whose work depends only on tokens.

As in Zeppelin (2025), "Remapping", a rank with more tokens than the mean sends the additional
tokens to other ranks. Let M_ij be the number of tokens that rank i sends to rank j, and C_ij the
time for sending one token. The time of the rank that sends longest is minimised, which is a linear
program:

    min_M max_i Σ_j C_ij M_ij

C has only two values, one inside a node and one between nodes. This linear program therefore has a
simple solution: ranks below the mean first receive tokens from those ranks of their node that would
otherwise send longest.
"""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.compiling import outside_graphs
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.layout import Layout


@outside_graphs
def token_balanced(layout: Layout, cluster: Cluster | str) -> Layout:
    """Return a layout in which all ranks have equal numbers of tokens, and to which `layout` can be
    moved in the least time.

    Each of the P ranks has ⌊T/P⌋ or ⌈T/P⌉ of the T tokens. `layout.remap(x,
    to=token_balanced(layout, cluster), group)` moves as few tokens as possible, and as few tokens
    as possible between nodes. A rank that sends tokens keeps its first tokens. `cluster` can be the
    name of a preset.

    Raises a ValueError unless `layout` is a `Layout` with the cluster's number of ranks.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be a seqpar.Layout, got {type(layout).__name__}")
    cluster = as_cluster(cluster)
    if layout.ranks != cluster.ranks:
        wanted = f"the layout's {layout.ranks} ranks"
        raise ValueError(f"cluster must have {wanted}, got one with {cluster.ranks}")
    tokens = np.array(layout.tokens_per_rank, np.int64)
    owners, counts = _owners(tokens, moves(tokens, cluster))
    pieces = []  # each rank's spans, cut where the receiving rank changes
    for holding, owner, count in zip(layout.geometry.holdings, owners, counts, strict=True):
        stops = np.cumsum(count)
        index, spans = holding.spans_in(stops - count, stops)
        pieces.append(np.stack([owner[index], *spans]))
    return Layout(layout.cu_seqlens, Spans.of(layout.ranks, *np.concatenate(pieces, 1)))


def moves(tokens: Ints, cluster: Cluster) -> Ints:
    """Return (n, 3): the sender, the receiver and the number of tokens of each move."""
    ranks, size = tokens.size, cluster.devices_per_node
    target = np.full(ranks, tokens.sum() // ranks)
    most = np.argsort(-tokens, kind="stable")[: tokens.sum() % ranks]
    # The ranks with the most tokens keep one token more, so that fewer tokens are moved.
    target[most] += 1
    surplus, room = np.maximum(tokens - target, 0), np.maximum(target - tokens, 0)
    prices = 1 / cluster.inside.rate, 1 / cluster.between.rate if cluster.nodes > 1 else 1.0
    found: list[Ints] = []
    for node in range(cluster.nodes):
        here = slice(node * size, (node + 1) * size)
        inside = _inside(surplus[here], int(room[here].sum()), *prices)
        within = _match(inside, room[here]) + np.array([node * size, node * size, 0])
        surplus[here] -= inside
        np.subtract.at(room, within[:, 1], within[:, 2])
        found.append(within)
    return np.concatenate([*found, _match(surplus, room)])


def _inside(surplus: Ints, room: int, inside: float, between: float) -> Ints:
    """Return how many tokens each rank sends inside its node. The ranks of the node together can
    receive `room` tokens.
    """
    # The seconds of a rank that sends a of s surplus tokens inside are inside·a + between·(s − a).
    # The longest time is least if all ranks above a level are brought down to that level.
    if surplus.sum() <= room:
        return surplus
    gain = max(between - inside, 0.0)
    if not gain:  # links inside nodes are not faster, so any choice is optimal
        return _fill(surplus, room)
    low, high = 0.0, float(surplus.max()) * between

    def sent(level: float) -> Ints:
        wanted = np.ceil((surplus * between - level) / gain)
        return np.clip(wanted, 0, surplus).astype(np.int64)

    # Bisect to the last bit of the level.
    while low < (level := (low + high) / 2) < high:
        low, high = (low, level) if sent(level).sum() <= room else (level, high)
    least = sent(high)
    return least + _fill(surplus - least, room - int(least.sum()))


def _fill(most: Ints, total: int) -> Ints:
    """Distribute `total` over the ranks, and return the amount of each rank. The amount of a rank
    is at most its entry of `most`, and the first ranks get as much as possible.
    """
    before = np.cumsum(most) - most
    return np.clip(total - before, 0, most)


def _match(sent: Ints, room: Ints) -> Ints:
    """Return (n, 3): the sender, the receiver and the number of tokens of each move. Rank r sends
    `sent[r]` tokens and can receive `room[r]` tokens.
    """
    ends = np.cumsum(sent), np.cumsum(room)
    total = min(int(ends[0][-1]), int(ends[1][-1]))
    stops = np.unique(np.minimum(np.concatenate(ends), total))
    stops = stops[stops > 0]
    starts = np.r_[0, stops][: stops.size]
    ranks = (np.searchsorted(end, starts, side="right") for end in ends)
    return np.stack([*ranks, stops - starts], 1)


def _owners(tokens: Ints, moved: Ints) -> tuple[list[Ints], list[Ints]]:
    """Return two lists with an array for each rank: the ranks that hold its tokens after the move,
    and how many of its tokens each of these ranks holds. The first of these ranks is the rank
    itself.
    """
    ranks = np.arange(tokens.size)
    kept = tokens - np.bincount(moved[:, 0], moved[:, 2], tokens.size).astype(np.int64)
    table = np.concatenate([np.stack([ranks, ranks, kept], 1), moved])
    table = table[np.argsort(table[:, 0], kind="stable")]
    edges = np.searchsorted(table[:, 0], ranks[1:])
    return np.split(table[:, 1], edges), np.split(table[:, 2], edges)


def remapping(costs: Costs, tokens: Ints) -> tuple[Floats, Floats]:
    """Return two arrays (ranks,): the seconds and the sent bytes of one pass, forward or backward,
    for moving tokens to a different layout and back in each layer.
    """
    # `tokens` (ranks,) are the numbers of tokens in attention. If a rank has more tokens in
    # attention than in linear modules, it receives inputs of attention for the difference, and
    # sends results. If it has fewer tokens in attention, it sends inputs and receives results.
    # Gradients are sent in the opposite direction. Over both passes, a rank therefore sends half of
    # the bytes that are moved from or to it.
    cluster, ranks = costs.cluster, tokens.size
    one, other, count = moves(tokens, cluster).T
    inside = one // cluster.devices_per_node == other // cluster.devices_per_node
    share = min(1.0, cluster.nics / cluster.devices_per_node)  # of a NIC, if all devices send
    nbytes = costs.attention_bytes(count)
    near, far = cluster.inside, cluster.between
    rate = np.where(inside, near.rate, far.rate * share)
    messages = 2 * len(costs.model.layers) * np.where(inside, near.latency, far.latency)
    seconds = nbytes / rate + messages
    both = np.concatenate([one, other])

    def of_ranks(values: Floats) -> Floats:
        return np.bincount(both, np.tile(values, 2), ranks).astype(np.float64)

    return of_ranks(seconds), of_ranks(nbytes / 2)
