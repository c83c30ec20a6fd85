"""Costs for groups of ranks that divide the heads of attention. The planner treats each group as a
single rank.

Fang and Zhao, "USP" (2024). Heads are exchanged within a group of ranks of one node. A ring
connects the groups. In the ring, a rank sends only the keys and values of the heads that it
computes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from seqpar.balance.predict.batch import Offloading
from seqpar.balance.predict.prediction import Prediction
from seqpar.core.arguments import Ints
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Link
from seqpar.costs.grid import Floats
from seqpar.costs.model import Model
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.geometry import Holding
from seqpar.layout.handle import LayoutCut


class SharedHeads(Costs):
    """Costs of a cluster whose ranks are groups of `heads` ranks of a node.

    Numbers of tokens are per group, and seconds and bytes are per rank. Raises a ValueError that
    names `heads` if the model has linear layers, or if `heads` does not divide the number of
    devices per node, of query heads and of KV heads.
    """

    def __init__(self, cluster: Cluster, model: Model, heads: int) -> None:
        divided = {
            "a node's devices": cluster.devices_per_node,
            "the model's heads": model.heads,
            "the model's KV heads": model.kv_heads,
        }
        for name, count in divided.items():
            if count % heads:
                raise ValueError(f"heads must divide {name}, {count}, got {heads}")
        if any(layer.kind == "linear" for layer in model.layers):
            raise ValueError(f"heads must be 1 for a model with linear layers, got {heads}")
        self.heads, self._alone = heads, Costs(cluster, model)
        # The fraction of a NIC that a device gets if all devices send.
        share = min(1.0, cluster.nics / cluster.devices_per_node)
        between = Link(cluster.between.latency, cluster.between.rate * (share or 1.0))
        groups = cluster.devices_per_node // heads
        grouped = replace(cluster, devices_per_node=groups, nics=groups, between=between)
        each = replace(model, heads=model.heads // heads, kv_heads=model.kv_heads // heads)
        super().__init__(grouped, each)

    def tokenwise(self, tokens: ArrayLike, backward: bool = False) -> Floats:
        """Return the seconds of linear modules and of exchanging heads, on each rank of a group."""
        part = np.asarray(tokens, np.float64) / self.heads
        exchange = self.exchange_bytes(tokens) / self.cluster.inside.rate
        return self._alone.tokenwise(part, backward) + exchange

    def kept_bytes(self, tokens: ArrayLike, checkpointing: str = "none") -> Floats:
        """Return the bytes that each rank keeps until backward. `tokens` is the number of tokens of
        the rank's group.
        """
        return self._alone.kept_bytes(tokens, checkpointing) / self.heads

    def exchange_bytes(self, tokens: ArrayLike) -> Floats:
        part = np.asarray(tokens, np.float64) / self.heads
        return self._alone.attention_bytes(part) * (1 - 1 / self.heads)


def spread(
    costs: SharedHeads,
    lengths: Ints,
    cut: LayoutCut,
    found: Prediction,
    offloading: Offloading | None,
) -> tuple[LayoutCut, Prediction]:
    """Divide the tokens of each group of ranks equally among the ranks of the group.

    Returns the spans of documents on each rank, and the prediction for each rank. `offloading`
    describes how many activations a rank can keep in host memory.
    """
    groups, heads, cu = costs.cluster.ranks, costs.heads, np.r_[0, np.cumsum(lengths)]
    table = []
    for group in range(groups):
        holding = Holding(cut.columns(cu, group))
        edges = holding.tokens * np.arange(heads + 1) // heads
        index, parts = holding.spans_in(edges[:-1], edges[1:])
        table.append(np.stack([group * heads + index, *parts]))
    ranks, documents, starts, stops = np.concatenate(table, 1)
    tokens = np.bincount(ranks, stops - starts, groups * heads).astype(np.int64)
    sent = found.bytes + 2 * costs.exchange_bytes(found.tokens)
    seconds, sent = (np.repeat(x, heads) for x in (found.seconds, sent))
    offload = np.zeros(tokens.size) if offloading is None else offloading.needed(tokens)
    spans = Spans.of(groups * heads, ranks, documents, starts, stops)
    return spans, Prediction(seconds, tokens, sent, offload)
