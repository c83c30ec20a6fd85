"""Predict the cost of moving tokens to balanced ranks for linear modules, and back for attention.

Zeppelin (2025), "Remapping". Linear modules compute queries, keys and values where tokens are
balanced. These move to the layout of attention, and attention's results move back. In the backward
pass the gradients of both move.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.token_balance import moves
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats


def remapping(costs: Costs, tokens: Ints) -> tuple[Floats, Floats]:
    """Return (ranks,) seconds and bytes sent of remapping all layers, in forward or in backward.

    A rank with more of the `tokens` (ranks,) in attention than in linear modules receives
    attention's inputs and sends its results for the difference; others do the opposite. Gradients
    go the other way, so over both passes each rank sends half of all that is moved.
    """
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
