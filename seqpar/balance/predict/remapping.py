"""What it takes to move tokens to even ranks for linear modules, and back for attention.

Zeppelin (2025), "Remapping": queries, keys and values, made where tokens are even, move to the
layout of attention, and its results move back. In backward their gradients do.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.token_balance import moves
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats


def remapping(costs: Costs, tokens: Ints) -> tuple[Floats, Floats]:
    """Return (ranks,) seconds and bytes sent of remapping all layers, in forward or in backward.

    `tokens` are (ranks,) those of attention. A rank with more of them than of others gets what
    attention reads of the difference, and sends what it writes; the rank with fewer does the
    opposite. In backward gradients go the other way, so both send half of all that is moved.
    """
    cluster, ranks = costs.cluster, tokens.size
    one, other, count = moves(tokens, cluster).T
    inside = one // cluster.devices_per_node == other // cluster.devices_per_node
    share = min(1.0, cluster.nics / cluster.devices_per_node)  # of a NIC, where all devices send
    nbytes = costs.attention_bytes(count)
    near, far = cluster.inside, cluster.between
    rate = np.where(inside, near.rate, far.rate * share)
    messages = 2 * len(costs.model.layers) * np.where(inside, near.latency, far.latency)
    seconds = nbytes / rate + messages
    both = np.concatenate([one, other])

    def of_ranks(values: Floats) -> Floats:
        return np.bincount(both, np.tile(values, 2), ranks).astype(np.float64)

    return of_ranks(seconds), of_ranks(nbytes / 2)
