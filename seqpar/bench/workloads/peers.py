"""Other ways to compute attention on several ranks, measured beside ours where they are installed.

Each is the function that its library documents, between tensors (T_local, H, D). All ranks of the
process take part. What one cannot do, it refuses or fails at: the sweep shows that.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.bench.workloads.masks import PackedBatch
from seqpar.comm import plain
from seqpar.layout.layout import Layout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OtherLibrary:
    """A contender that is not ours, on one rank.

    Attributes:
        indices: (T_local,), which tokens of the batch this rank has.
        attend: (q, k, v) -> out, differentiable.
        context: makes the context in which forward and backward run.
    """

    indices: Tensor
    attend: Attend
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention of (T, H, D) over one document, by torch's own function."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out[0].transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """(T/P, H, D) -> (T, H/P, D), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _all_to_all(x, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, not ctx.to_heads), None


def _all_to_all(x: Tensor, to_heads: bool) -> Tensor:
    """Exchange tokens for heads, or heads for tokens."""
    _, ranks = plain.rank_of_all()
    if to_heads:
        sent = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return plain.all_to_all(sent).flatten(0, 1)
    received = plain.all_to_all(x.unflatten(0, (ranks, -1)).contiguous())
    return received.transpose(0, 1).flatten(1, 2)


def all_to_all_by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by the all-to-all that people write around SDPA: Ulysses, in few lines."""
    if k.shape[1] % plain.rank_of_all()[1]:
        raise ValueError(f"ranks must divide KV heads, got {k.shape[1]}")
    q, k, v = (_Exchange.apply(x, True) for x in (q, k, v))
    out: Tensor = _Exchange.apply(sdpa(q, k, v, causal), False)
    return out


def ring_attention_pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by the package ring-attention-pytorch."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    out: Tensor = ring_flash_attn(q[None], k[None], v[None], causal=causal, ring_reduce_col=True)
    return out[0]


def ring_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by the package ring-flash-attn: its zigzag ring if causal, else its ring."""
    import ring_flash_attn as package

    ring = package.zigzag_ring_flash_attn_func if causal else package.ring_flash_attn_func
    out: Tensor = ring(q[None], k[None], v[None], causal=causal)
    return out[0]


def even_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return the tokens of a rank where each has as many, in order."""
    if batch.tokens % ranks:
        raise ValueError(f"it needs as many tokens on each rank, got {batch.tokens} on {ranks}")
    return Layout.contiguous(batch.tokens, ranks).token_indices(rank)


def zigzag_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return the tokens of a rank where each has two chunks of one size, if causal."""
    if not batch.causal:
        return even_parts(batch, rank, ranks)
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    return Layout.zigzag(batch.tokens, ranks).token_indices(rank)


def _plainly(
    attend: Callable[..., Tensor], parts: Callable[[PackedBatch, int, int], Tensor]
) -> Callable[[PackedBatch, torch.device], OtherLibrary]:
    """Return what makes a peer that takes one document, causal or full."""

    def make(batch: PackedBatch, device: torch.device) -> OtherLibrary:
        return OtherLibrary(
            parts(batch, *plain.rank_of_all()), functools.partial(attend, causal=batch.causal)
        )

    return make


def torch_context_parallel(batch: PackedBatch, device: torch.device) -> OtherLibrary:
    """Return torch's context parallel, which itself says which tokens a rank has."""
    _, ranks = plain.rank_of_all()
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    indices = torch.arange(batch.tokens, device=device)
    with plain.context_parallel(indices):
        pass
    # It takes no context without a buffer: this one has an element a chunk.
    chunks = functools.partial(torch.zeros, 2 * ranks, device=device)
    attend = functools.partial(sdpa, causal=batch.causal)
    return OtherLibrary(indices.cpu(), attend, lambda: plain.context_parallel(chunks()))


# What makes each, which module it needs beside torch, and the packages whose versions count.
PEERS: dict[
    str, tuple[Callable[[PackedBatch, torch.device], OtherLibrary], str | None, tuple[str, ...]]
] = {
    "all-to-all-by-hand": (_plainly(all_to_all_by_hand, even_parts), None, ()),
    "torch-context-parallel": (torch_context_parallel, None, ()),
    "ring-flash-attn": (
        _plainly(ring_flash_attn, zigzag_parts),
        "ring_flash_attn",
        ("ring-flash-attn", "flash-attn"),
    ),
    "ring-attention-pytorch": (
        _plainly(ring_attention_pytorch, even_parts),
        "ring_attention_pytorch",
        ("ring-attention-pytorch",),
    ),
}


def lacking(name: str) -> str | None:
    """Return the package that a peer needs and that is not here, or None."""
    package = PEERS[name][1]
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return package


def make(name: str, batch: PackedBatch, device: torch.device) -> OtherLibrary:
    """Return a peer on this rank; raise a ValueError if it cannot compute the batch."""
    if not batch.plain:
        raise ValueError("here it computes one document, causal or full, and nothing else")
    return PEERS[name][0](batch, device)
