"""Layouts with equal numbers of tokens per rank, for layers whose work depends on tokens alone.

Zeppelin (2025), "Remapping", moves the tokens that a rank has above the mean. Let M_ij be the
number of tokens that rank i sends to rank j, and C_ij the time of a token. The moves minimise the
time of the rank that sends longest, a linear program:

    min_M max_i Σ_j C_ij M_ij

C has only two values, one inside a node and one between nodes, so the program has a closed
solution. Ranks below the mean first receive tokens from the ranks of their node that would
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
    """Return the balanced layout to which tokens of `layout` move in the least time.

    A balanced layout has ⌊T/P⌋ or ⌈T/P⌉ tokens on each of the P ranks.
    `layout.remap(x, to=token_balanced(layout, cluster), group)` then moves as few tokens as
    possible, and moves as many of these tokens as possible inside nodes. A rank that sends tokens
    keeps its first tokens. `cluster` may be the name of a preset.

    Raise a ValueError unless `layout` is a `Layout` with the cluster's number of ranks.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be a seqpar.Layout, got {type(layout).__name__}")
    cluster = as_cluster(cluster)
    if layout.ranks != cluster.ranks:
        wanted = f"the layout's {layout.ranks} ranks"
        raise ValueError(f"cluster must have {wanted}, got one with {cluster.ranks}")
    tokens = np.array(layout.tokens_per_rank, np.int64)
    owners, counts = _owners(tokens, moves(tokens, cluster))
    pieces = []  # each rank's spans, cut where the rank that receives tokens changes
    for holding, owner, count in zip(layout.geometry.holdings, owners, counts, strict=True):
        stops = np.cumsum(count)
        index, spans = holding.spans_in(stops - count, stops)
        pieces.append(np.stack([owner[index], *spans]))
    return Layout(layout.cu_seqlens, Spans.of(layout.ranks, *np.concatenate(pieces, 1)))


def moves(tokens: Ints, cluster: Cluster) -> Ints:
    """Return (n, 3) sender, receiver and number of tokens to move; `tokens` is (ranks,)."""
    ranks, size = tokens.size, cluster.devices_per_node
    target = np.full(ranks, tokens.sum() // ranks)
    most = np.argsort(-tokens, kind="stable")[: tokens.sum() % ranks]
    target[most] += 1  # the ranks with the most tokens keep one more, so fewer move
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
    """Return how many tokens each rank sends inside its node, which has `room` free places."""
    # The seconds of a rank that sends a of s surplus tokens inside are inside·a + between·(s − a).
    # The longest time is least if all ranks above a level are brought down to that level.
    if surplus.sum() <= room:
        return surplus
    gain = max(between - inside, 0.0)
    if not gain:  # links inside are not faster, so any choice is optimal
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
    """Return counts that sum to `total`, each at most `most`, filling the first ranks first."""
    before = np.cumsum(most) - most
    return np.clip(total - before, 0, most)


def _match(sent: Ints, room: Ints) -> Ints:
    """Return (n, 3) sender, receiver and count. Tokens and free places are matched in order."""
    ends = np.cumsum(sent), np.cumsum(room)
    total = min(int(ends[0][-1]), int(ends[1][-1]))
    stops = np.unique(np.minimum(np.concatenate(ends), total))
    stops = stops[stops > 0]
    starts = np.r_[0, stops][: stops.size]
    ranks = (np.searchsorted(end, starts, side="right") for end in ends)
    return np.stack([*ranks, stops - starts], 1)


def _owners(tokens: Ints, moved: Ints) -> tuple[list[Ints], list[Ints]]:
    """Return each rank's receivers, itself first, and the number of tokens for each receiver."""
    ranks = np.arange(tokens.size)
    kept = tokens - np.bincount(moved[:, 0], moved[:, 2], tokens.size).astype(np.int64)
    table = np.concatenate([np.stack([ranks, ranks, kept], 1), moved])
    table = table[np.argsort(table[:, 0], kind="stable")]
    edges = np.searchsorted(table[:, 0], ranks[1:])
    return np.split(table[:, 1], edges), np.split(table[:, 2], edges)


def remapping(costs: Costs, tokens: Ints) -> tuple[Floats, Floats]:
    """Return (ranks,) seconds and bytes sent to remap all layers, in forward or in backward."""
    # `tokens` (ranks,) are the numbers of tokens in attention. A rank with more tokens in attention
    # than in linear modules receives attention's inputs for the difference, and sends attention's
    # results. A rank with fewer tokens in attention sends inputs and receives results. Gradients
    # are sent in the opposite direction, so each rank sends half of its moved bytes over both
    # passes together.
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
