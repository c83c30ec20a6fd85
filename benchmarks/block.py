"""A layer of a transformer. Its attention is an argument of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a gated MLP, as in Llama, without positions."""

    def __init__(self, heads: int, kv_heads: int, dim: int, ffn: int, **made: Any) -> None:
        """Make a layer whose MLP has `ffn` units. `made` has the device and dtype."""
        super().__init__()
        width, self._heads, self._dim = heads * dim, (heads, kv_heads, kv_heads), dim
        sizes = (width, sum(self._heads) * dim), (width, width), (width, 2 * ffn), (ffn, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width, **made) for _ in range(2))
        self.qkv, self.out, self.gate_up, self.down = (
            nn.Linear(*size, bias=False, **made) for size in sizes
        )

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the layer's output of (tokens, width)."""
        projected = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self._dim))
        x = x + self.out(attend(*projected.split(self._heads, 1)).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
