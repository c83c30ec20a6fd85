"""A small decoder-only transformer (RoPE, GQA, RMSNorm, SwiGLU) whose attention is handed to it.

`attend(q, k, v)` takes (T, Hq, D), (T, Hkv, D), (T, Hkv, D) and returns (T, Hq, D): all that the model knows of sequence
parallelism is that function, and the position of each of its tokens. T is the number of tokens on this rank.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[..., Tensor]


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, dim: int = 128, layers: int = 3, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(T,) bytes and their positions in their documents -> (T, 256) logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


class Layer(nn.Module):
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
        """Attention of the normalised input: (T, dim) -> (T, dim)."""
        q, k, v = self.heads(x)
        return attend(rope(q, positions), rope(k, positions), v).flatten(1)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(T, dim) -> q (T, Hq, D), k and v (T, Hkv, D)."""
        return self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, 1)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of (T, H, D) by each token's position in its document, wherever the token lives."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * frequency
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
