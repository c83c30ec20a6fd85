"""Units of 8 GPUs with tensor parallelism, and the costs of a model's layers on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.balance import Cluster, Costs, Model, RowBytes, Tasks
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats, causal_pairs

TENSOR = 8  # GPUs of a unit
WAYS = (False, True)
# 34B as in DistCA's tables; the feed-forward part as in published models of this width.
CONFIG_34B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 16, "intermediate_size": 22016,
    "vocab_size": 128256,
}  # fmt: skip


class Machine(NamedTuple):
    """The costs of a model's layers on units."""

    costs: Costs
    row_bytes: RowBytes

    @classmethod
    def of(cls, name: str) -> Machine:
        """Return the machine for a model, "8B" or "34B"."""
        model = Model.preset("llama-8b") if name == "8B" else Model.from_config(CONFIG_34B)
        rows = RowBytes.of(model.heads, model.kv_heads, model.head_dim)
        return cls(Costs(Cluster.preset("2x8-h200"), model), rows)

    @property
    def layers(self) -> int:
        return len(self.costs.model.layers)

    def linear(self, tokens: Floats, way: bool) -> Floats:
        """Return the seconds of one layer's modules on units with these numbers of tokens."""
        computing = self.costs.tokenwise(tokens, way) / (self.layers * TENSOR)
        # Two all-gathers and two reduce-scatters of activations, in each direction.
        part = 4 * (TENSOR - 1) / TENSOR * self.costs.itemsize * self.costs.model.hidden
        return computing + tokens * part / self.costs.cluster.inside.rate

    def attention(self, calls: Tasks, owner: Ints, units: int, way: bool) -> Floats:
        """Return (units,) seconds of one layer's attention."""
        heads = self.costs.model.heads // TENSOR
        return self.costs.attention_call(calls, owner, units, way, heads)

    def travel(self, nbytes: Floats) -> Floats:
        """Return the seconds to send these bytes, divided among the NICs of a unit's GPUs."""
        return nbytes / TENSOR / self.costs.cluster.between.rate

    def weights(self, lengths: Ints) -> Floats:
        """Return the seconds of one layer that whole documents add to a unit."""
        found = np.zeros(lengths.size)
        own = np.arange(lengths.size)
        for way in WAYS:
            call = self.costs.cluster.device.attention.call[way]
            calls = Tasks.of(lengths, lengths, causal_pairs(0 * lengths, lengths))
            found += self.attention(calls, own, lengths.size, way) - call
            found += self.linear(lengths.astype(np.float64), way)
        return found
