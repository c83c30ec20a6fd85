"""The largest score of each head, as QK-clip needs it.

Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1: S_max of a head is the largest
scale · q·k of all pairs of a batch, before the softmax; where it is above a threshold, the head's
weights are made smaller. Kernels keep no maximum, so scores are computed once more beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.exchange import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic


@dataclass(eq=False)
class MaxLogits:
    """The largest scores found so far.

    Attributes:
        values: (Hq,), fp32 (fp64 for fp64); −∞ of a head that has no pair.
    """

    values: Tensor

    @classmethod
    def nothing(cls, q: Tensor) -> MaxLogits:
        """Return those of no pair, for the heads of q (B, T, Hq, D)."""
        dtype = accumulator_dtype(q.dtype)
        return cls(q.new_full((q.shape[2],), -torch.inf, dtype=dtype))

    def of_heads(self, heads: slice) -> MaxLogits:
        """Return those of some heads, which are changed with these."""
        return MaxLogits(self.values[heads])

    def update(self, found: Tensor) -> None:
        """Take over larger scores (Hq,)."""
        torch.maximum(self.values, found, out=self.values)

    def of_all_ranks(self, comm: Comm) -> Tensor:
        """Return the largest of all ranks: Hq numbers go to each."""
        arriving = [(peer, torch.empty_like(self.values)) for peer in comm.peers]
        sends = [(peer, self.values) for peer in comm.peers]
        comm.exchange(sends, arriving, label="max logits").wait()
        return torch.stack([self.values, *(values for _, values in arriving)]).amax(0)


def max_logits_traffic(shape: OperandShape, rank: int, ranks: int) -> list[Traffic]:
    """Return what a rank sends of them."""
    size = shape.heads * accumulator_dtype(shape.dtype).itemsize
    return [Traffic("forward", 0, peer, 1, size) for peer in range(ranks) if peer != rank]
