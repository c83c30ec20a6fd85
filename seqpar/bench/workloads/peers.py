"""Other libraries' attention on several ranks, measured next to ours if they are installed.

Each is the function that its library documents, on tensors (T_local, H, D), and all ranks of the
process group take part. The sweep shows the refusals and failures of each library.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from seqpar.bench.workloads.masks import PackedBatch
from seqpar.comm import plain
from seqpar.layout.layout import Layout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OtherLibrary:
    """A contender of another library on one rank."""

    indices: Tensor  # (T_local,) the batch's tokens on this rank
    attend: Attend  # (q, k, v) -> out, differentiable
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)  # of a step


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out[0].transpose(0, 1)


class _ExchangeContext(FunctionCtx):
    to_heads: bool


class _Exchange(torch.autograd.Function):
    """(T/P, H, D) -> (T, H/P, D), or the reverse."""

    @staticmethod
    def forward(ctx: _ExchangeContext, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _all_to_all(x, to_heads)

    @staticmethod
    def backward(ctx: _ExchangeContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, not ctx.to_heads), None


def _all_to_all(x: Tensor, to_heads: bool) -> Tensor:
    _, ranks = plain.rank_of_all()
    if to_heads:
        sent = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return plain.all_to_all(sent).flatten(0, 1)
    received = plain.all_to_all(x.unflatten(0, (ranks, -1)).contiguous())
    return received.transpose(0, 1).flatten(1, 2)


def all_to_all_by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by SDPA between two all-to-alls: a short Ulysses without a library."""
    if k.shape[1] % plain.rank_of_all()[1]:
        raise ValueError(f"ranks must divide KV heads, got {k.shape[1]}")
    q, k, v = (_Exchange.apply(x, True) for x in (q, k, v))
    return _Exchange.apply(sdpa(q, k, v, causal), False)


def ring_attention_pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    out: Tensor = ring_flash_attn(q[None], k[None], v[None], causal=causal, ring_reduce_col=True)
    return out[0]


def ring_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by the package ring-flash-attn: zigzag ring if causal, otherwise ring."""
    import ring_flash_attn as package

    ring = package.zigzag_ring_flash_attn_func if causal else package.ring_flash_attn_func
    out: Tensor = ring(q[None], k[None], v[None], causal=causal)
    return out[0]


def even_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return a rank's tokens if the batch is cut into equal, contiguous parts."""
    if batch.tokens % ranks:
        raise ValueError(f"it needs equal tokens on all ranks, got {batch.tokens} on {ranks}")
    return Layout.contiguous(batch.tokens, ranks).token_indices(rank)


def zigzag_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return a rank's tokens if a causal batch is cut into two equal chunks per rank."""
    if not batch.causal:
        return even_parts(batch, rank, ranks)
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    return Layout.zigzag(batch.tokens, ranks).token_indices(rank)


def _plainly(
    attend: Callable[..., Tensor], parts: Callable[[PackedBatch, int, int], Tensor]
) -> Callable[[PackedBatch, torch.device], OtherLibrary]:
    """Return a factory for a library that takes one document, causal or full."""

    def make(batch: PackedBatch, device: torch.device) -> OtherLibrary:
        return OtherLibrary(
            parts(batch, *plain.rank_of_all()), functools.partial(attend, causal=batch.causal)
        )

    return make


def torch_context_parallel(batch: PackedBatch, device: torch.device) -> OtherLibrary:
    """Return torch's context parallel, which itself decides the tokens of a rank."""
    _, ranks = plain.rank_of_all()
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    indices = torch.arange(batch.tokens, device=device)
    with plain.context_parallel(indices):
        pass
    # The context requires a buffer; this one has one element per chunk.
    chunks = functools.partial(torch.zeros, 2 * ranks, device=device)
    attend = functools.partial(sdpa, causal=batch.causal)
    return OtherLibrary(indices.cpu(), attend, lambda: plain.context_parallel(chunks()))


# The factory, the module that it imports (or None), and the packages whose versions are recorded.
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
    package = PEERS[name][1]
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return package


def make(name: str, batch: PackedBatch, device: torch.device) -> OtherLibrary:
    if not batch.plain:
        raise ValueError("here it computes one document, causal or full, and no other batch")
    return PEERS[name][0](batch, device)
