"""Hold more tokens than fit on a device: some activations wait in host memory for backward.

Ge et al., "ByteScale" (2025), section 4: a document of s tokens takes the fewest ranks,
D(s) = ⌈[2·Act(s) + (1 − r)(l − 2)·Act(s)] / (l·Act(C))⌉, of capacity C, for the largest ratio r
whose copy hides under compute, T(s) ≥ r·Act(s)/min(B_d2h, B_h2d). Act and T are a layer's of l.

`seqpar.offload(r)` around the model keeps just that: (1 − r)·l layers' activations, and on their
way out or back r of two layers' more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats


@dataclass(frozen=True)
class Offloading:
    """What ranks may copy to their hosts.

    Attributes:
        most: of a rank's activations, from 0 to 1.
        capacity: tokens whose activations fit on a device.
        layers: how many the model has.
        copy_seconds: seconds that it takes to copy all that a token's forward keeps, one way.
    """

    most: float
    capacity: int
    layers: int
    copy_seconds: float

    @classmethod
    def of(cls, costs: Costs, capacity: int, most: float, checkpointing: str) -> Offloading:
        """Return what ranks may copy of activations that are checkpointed so."""
        copied = float(costs.kept_bytes(1, checkpointing)) / costs.cluster.host.rate
        return cls(most, capacity, len(costs.model.layers), copied)

    @property
    def free(self) -> float:
        """The share of activations that leaves the device if all is offloaded: (l − 2)/l."""
        return max(self.layers - 2, 0) / self.layers

    def hidden(self, tokens: Ints, forward: Floats) -> Floats:
        """Return the largest ratios whose copies hide under so many seconds of forward.

        Backward takes longer than forward, so what is copied back is hidden too.
        """
        return np.minimum(forward / (tokens * self.copy_seconds), self.most)

    def kept(self, ratio: Floats) -> Floats:
        """Return which shares of activations stay on the device: [2 + (1 − r)(l − 2)]/l."""
        return 1 - ratio * self.free

    def needed(self, tokens: Ints) -> Floats:
        """Return the least ratios with which ranks hold so many tokens, at most `most`."""
        if not self.free:
            return np.zeros(tokens.shape)
        over = 1 - self.capacity / np.maximum(tokens, self.capacity)
        return np.minimum(over / self.free, self.most)
