"""A step of softmax attention on this rank: forward, backward, and the expected results.

All ranks of the process group draw the same batch, and each computes with its own tokens.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import exposed, sleeping, worst_error
from seqpar import Layout, make_attention
from seqpar.softmax.module import Attention


@functools.cache
def module(strategy: str, **options: Any) -> Attention:
    """Return a strategy's module on all ranks. USP's mesh has two rows, Mesh's is a square."""
    ranks = dist.get_world_size()
    side = math.isqrt(ranks)
    meshes = {"usp": (2, ranks // 2), "mesh": (side, side)}
    on_mesh = strategy in meshes
    group = init_device_mesh("cpu", meshes[strategy]) if on_mesh else dist.group.WORLD
    return make_attention(strategy, group, **options)


class Step:
    """A rank's part of a batch, and calls of attention modules on it."""

    def __init__(
        self,
        layout: Layout,
        heads: int,
        dim: int,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        backward: bool = True,
        **call: Any,
    ) -> None:
        """Draw a batch. `call` has arguments of the call; it is causal by default."""
        self.rank, self._layout, self._backward = dist.get_rank(), layout, backward
        self._call = {"causal": True, **call}
        generator = torch.Generator().manual_seed(0)
        self._whole = [
            torch.randn(layout.tokens, n, dim, generator=generator).to(dtype)
            for n in (heads, kv_heads or heads, kv_heads or heads, heads)
        ]
        local = [layout.shard(x, self.rank).contiguous() for x in self._whole]
        *self.operands, self._dout = local
        self.operands = [x.requires_grad_(backward) for x in self.operands]

    def forward(self, attn: Any) -> Tensor:
        out: Tensor = attn(*self.operands, self._layout, **self._call)
        return out

    def __call__(self, attn: Any) -> list[Tensor]:
        """Return out and, with backward, the gradients of q, k and v."""
        out = self.forward(attn)
        if not self._backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, self.operands, self._dout)]

    def seconds(self, attn: Any) -> float:
        """Return this rank's seconds of a step that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        self(attn)
        return time.perf_counter() - start

    def times(self, attn: Any, rounds: int, pair_seconds: float | None = None) -> list[float]:
        """Return the seconds of steps, after a first step. Computations may be `sleeping`."""
        with sleeping(pair_seconds):
            return [self.seconds(attn) for _ in range(rounds + 1)][1:]

    def exposed(self, attn: Any, rounds: int, pair_seconds: float | None = None) -> dict[str, Any]:
        """Return the exposure of a step, and the bytes that this rank sends in it."""

        def sent() -> int:
            return int(attn.sent_bytes)

        return exposed(lambda: self(attn), dist.group.WORLD, sent, rounds, pair_seconds)

    def expected(self) -> list[Tensor]:
        """Return this rank's rows of the results in fp64, by SDPA on whole documents."""
        q, k, v, dout = (x.double().requires_grad_() for x in self._whole)
        causal, (left, _) = self._call["causal"], self._call.get("window_size", (-1, -1))
        lengths, outs = np.diff(self._layout.cu_seqlens).tolist(), []
        for part in zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True):
            seen = None
            if left >= 0:
                position = torch.arange(part[0].shape[1])
                distance = position[:, None] - position
                seen = (distance >= 0) & (distance <= left)
            attending: dict[str, Any] = {"attn_mask": seen, "is_causal": causal and seen is None}
            outs.append(F.scaled_dot_product_attention(*part, **attending, enable_gqa=True))
        out = torch.cat(outs, 1).transpose(0, 1)
        found = [out, *torch.autograd.grad(out, [q, k, v], dout)] if self._backward else [out]
        return [self._layout.shard(x.detach(), self.rank) for x in found]

    def error(self, attn: Any) -> float:
        """Return the largest RMS error of this rank's results, divided by the RMS of `expected`."""
        return worst_error(self(attn), self.expected())
