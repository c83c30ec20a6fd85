"""The largest score of each head, which QK-clip needs during training.

In Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1, S_max of a head is the
largest scale · q·k over all pairs of a batch, before the softmax. If S_max exceeds a threshold,
training scales down the weights that make q and k of this head. Attention kernels do not return
S_max, so the scores are computed a second time, in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic


@dataclass(eq=False)
class MaxLogits:
    """The largest score of each head in the slices that were computed so far."""

    values: Tensor  # (Hq,), fp32 (fp64 for fp64); −∞ for a head without pairs

    @classmethod
    def nothing(cls, q: Tensor) -> MaxLogits:
        dtype = accumulator_dtype(q.dtype)
        return cls(q.new_full((q.shape[2],), -torch.inf, dtype=dtype))

    def of_heads(self, heads: slice) -> MaxLogits:
        """Return an object for the heads `heads`. Updates of the returned object also update this
        object.
        """
        return MaxLogits(self.values[heads])

    def update(self, scores: Tensor) -> None:
        torch.maximum(self.values, scores, out=self.values)

    def of_all_ranks(self, comm: Comm) -> Tensor:
        """Return the maximum over all ranks. Each rank sends Hq numbers to every other rank."""
        arriving = [(peer, torch.empty_like(self.values)) for peer in comm.peers]
        sends = [(peer, self.values) for peer in comm.peers]
        comm.exchange(sends, arriving, label="max logits").wait()
        return torch.stack([self.values, *(values for _, values in arriving)]).amax(0)


def max_logits_traffic(shape: OperandShape, rank: int, ranks: int) -> list[Traffic]:
    size = shape.heads * accumulator_dtype(shape.dtype).itemsize
    return [Traffic("forward", 0, peer, 1, size) for peer in range(ranks) if peer != rank]
