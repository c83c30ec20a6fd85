"""A small decoder-only transformer (RoPE, GQA, RMSNorm, SwiGLU) that takes its attention as input.

`attend(q, k, v)` takes (T, Hq, D), (T, Hkv, D), (T, Hkv, D) and returns (T, Hq, D), with T tokens
on this rank, Hq query heads, Hkv KV heads and head dim D. The model needs only this function and
each token's position to run on several ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[..., Tensor]


class Transformer(nn.Module):
    """A language model over bytes."""

    def __init__(
        self,
        vocabulary: int = 256,
        dim: int = 128,
        layers: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return (T, 256) logits for bytes (T,), given their positions in their documents (T,)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """A layer of attention and an MLP."""

    kind = "softmax"

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.split = [heads, kv_heads, kv_heads]
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * (8 * dim // 3), bias=False)
        self.down = nn.Linear(8 * dim // 3, dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = x + self.out(self.mix(self.attention_norm(x), positions, attend))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def mix(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the attention of the normalised input: (T, dim) -> (T, dim)."""
        q, k, v = self.heads(x)
        return attend(rope(q, positions), rope(k, positions), v).flatten(1)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q (T, Hq, D), k and v (T, Hkv, D) of x (T, dim)."""
        return self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, 1)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rotary position embedding of x (T, H, D).

    It uses each token's position in its document, on whatever rank the token is.
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * frequency
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
