"""Hold more tokens than fit on a device: some activations wait in host memory for backward.

Ge et al., "ByteScale" (2025), section 4. A document of s tokens takes the fewest ranks of capacity
C, D(s) = ⌈[2·Act(s) + (1 − r)(l − 2)·Act(s)] / (l·Act(C))⌉, for the largest ratio r whose copy
hides under compute, T(s) ≥ r·Act(s)/min(B_d2h, B_h2d). Act and T are per layer, and l is the number
of layers.

`seqpar.offload(r)` around the model keeps that amount on the device: (1 − r)·l layers' activations,
and a share r of two more layers' activations on their way out or back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats


@dataclass(frozen=True)
class Offloading:
    """The activations that ranks may copy to host memory."""

    most: float  # largest share of a rank's activations, from 0 to 1
    capacity: int  # tokens whose activations fit on a device
    layers: int  # number of the model's layers
    copy_seconds: float  # seconds to copy everything that a token's forward pass keeps, one way

    @classmethod
    def of(cls, costs: Costs, capacity: int, most: float, checkpointing: str) -> Offloading:
        """Return the limits for activations that are kept as `checkpointing` describes."""
        copied = float(costs.kept_bytes(1, checkpointing)) / costs.cluster.host.rate
        return cls(most, capacity, len(costs.model.layers), copied)

    @property
    def free(self) -> float:
        """The share of activations that leaves the device if all are offloaded: (l − 2)/l."""
        return max(self.layers - 2, 0) / self.layers

    def hidden(self, tokens: Ints, forward: Floats) -> Floats:
        """Return the ratios, up to `most`, whose copies hide under forward, and so backward."""
        return np.minimum(forward / (tokens * self.copy_seconds), self.most)

    def kept(self, ratio: Floats) -> Floats:
        """Return the shares of activations that stay on the device: [2 + (1 − r)(l − 2)]/l."""
        return 1 - ratio * self.free

    def needed(self, tokens: Ints) -> Floats:
        """Return the least ratios that let ranks hold `tokens` tokens, up to `most`."""
        if not self.free:
            return np.zeros(tokens.shape)
        over = 1 - self.capacity / np.maximum(tokens, self.capacity)
        return np.minimum(over / self.free, self.most)
