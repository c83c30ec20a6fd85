"""The contenders on a workload: one device, our strategies, and other libraries.

A *contender* computes a workload, so that it can be compared with other contenders. For another
library, the contender calls the function that the library documents, on tensors (T_local, H, D), on
all ranks of the process group. If the library refuses a workload or fails, the sweep reports the
error.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.bench.workloads.sweep_batches import PackedBatch
from seqpar.comm import plain
from seqpar.comm.launch import mesh_of_all, on_a_host
from seqpar.comm.messages.comm import Comm, Group
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import attention_modules, make_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]
ONE = "one device"
# Balanced on every layout, because each rank computes all tokens of some heads.
ON_CONTIGUOUS = ("ulysses",)


@dataclass(frozen=True)
class Contender:
    indices: Tensor  # (T_local,) the batch's tokens on this rank
    heads: int  # the number of heads that the contender computes
    kv_heads: int  # the number of KV heads that the contender computes
    attend: Attend  # (q, k, v) -> out, differentiable
    context: Context = field(default=nullcontext)  # the context in which a step runs
    sent_bytes: Callable[[], int] | None = None  # the bytes that this rank has sent, if known


def divisor(ranks: int, kv_heads: int) -> int:
    """Return the largest number of parts, at most `ranks`, into which the heads can be divided."""
    return math.gcd(ranks, kv_heads)


def make(
    name: str, comm: Comm, batch: PackedBatch, heads: int, kv_heads: int, device: torch.device
) -> Contender:
    if name == ONE:
        part = divisor(comm.size, kv_heads)
        return one_device(batch, heads // part, kv_heads // part)
    if name in attention_modules():
        cut = Layout.contiguous if name in ON_CONTIGUOUS else Layout.zigzag
        group: Group = comm
        if "mesh" in inspect.signature(attention_modules()[name]).parameters:
            group = mesh_of_all(device, grid(comm.size))
        layout = cut(batch.cu_seqlens, comm.size)
        return _on_layout(make_attention(name, group), layout, batch, heads, kv_heads)
    indices, attend, context = make_peer(name, batch, device)
    return Contender(indices, heads, kv_heads, attend, context)


def one_device(batch: PackedBatch, heads: int, kv_heads: int) -> Contender:
    """Our kernel on all tokens of some heads, on one device and without communication."""
    attention = make_attention("ring", Comm(ONE, 0, 1))
    return _on_layout(attention, Layout.contiguous(batch.cu_seqlens, 1), batch, heads, kv_heads)


def _on_layout(
    attention: Attention, layout: Layout, batch: PackedBatch, heads: int, kv_heads: int
) -> Contender:
    options = batch.options

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, layout, **options)

    indices = layout.token_indices(attention.rank)
    return Contender(indices, heads, kv_heads, attend, sent_bytes=lambda: int(attention.sent_bytes))


def grid(ranks: int) -> tuple[int, int]:
    """Return a mesh: one row per host if hosts have several ranks, otherwise nearly square."""
    local = on_a_host()
    if 1 < local < ranks and ranks % local == 0:
        return ranks // local, local
    inner = next(n for n in range(math.isqrt(ranks - 1) + 1, ranks + 1) if ranks % n == 0)
    return ranks // inner, inner


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _all_to_all(x: Tensor, to_heads: bool) -> Tensor:
    """Exchange x (T/P, H, D) to (T, H/P, D), or the reverse."""
    _, ranks = plain.rank_of_all()
    if to_heads:
        sent = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return plain.all_to_all(sent).flatten(0, 1)
    received = plain.all_to_all(x.unflatten(0, (ranks, -1)).contiguous())
    return received.transpose(0, 1).flatten(1, 2)


def all_to_all_by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Ulysses written by hand: SDPA between two all-to-alls."""
    _, ranks = plain.rank_of_all()
    if k.shape[1] % ranks:
        heads = f"{k.shape[1]} heads on {ranks} ranks"
        raise ValueError(f"the number of ranks must divide the KV heads, got {heads}")
    q, k, v = (_all_to_all(x, True) for x in (q, k, v))
    return _all_to_all(sdpa(q, k, v, causal), False)


def ring_attention_pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    out: Tensor = ring_flash_attn(q[None], k[None], v[None], causal=causal, ring_reduce_col=True)
    return out[0]


def ring_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by the package ring-flash-attn: its zigzag ring for causal masks, and otherwise its
    ring.
    """
    import ring_flash_attn as package

    ring = package.zigzag_ring_flash_attn_func if causal else package.ring_flash_attn_func
    out: Tensor = ring(q[None], k[None], v[None], causal=causal)
    return out[0]


def even_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return a rank's tokens if the batch is cut into equal, contiguous parts."""
    if batch.tokens % ranks:
        raise ValueError(
            f"it needs equal tokens on all ranks, got {batch.tokens} tokens on {ranks}"
        )
    return Layout.contiguous(batch.tokens, ranks).token_indices(rank)


def zigzag_parts(batch: PackedBatch, rank: int, ranks: int) -> Tensor:
    """Return a rank's tokens if a causal batch is cut into two equal chunks per rank."""
    if not batch.causal:
        return even_parts(batch, rank, ranks)
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    return Layout.zigzag(batch.tokens, ranks).token_indices(rank)


# (tokens, attention, context) of a contender of another library.
Peer = tuple[Tensor, Attend, Context]
MakePeer = Callable[[PackedBatch, torch.device], Peer]


def _plainly(
    attend: Callable[..., Tensor], parts: Callable[[PackedBatch, int, int], Tensor]
) -> MakePeer:
    """Return a function that makes the call of a library which supports only one document with a
    causal or full mask.
    """

    def make(batch: PackedBatch, device: torch.device) -> Peer:
        indices = parts(batch, *plain.rank_of_all())
        return indices, functools.partial(attend, causal=batch.causal), nullcontext

    return make


def torch_context_parallel(batch: PackedBatch, device: torch.device) -> Peer:
    """Return the contender "torch context parallel". torch itself chooses the tokens of each
    rank.
    """
    _, ranks = plain.rank_of_all()
    if batch.tokens % (2 * ranks):
        raise ValueError(f"it needs {2 * ranks} equal chunks, got {batch.tokens} tokens")
    indices = torch.arange(batch.tokens, device=device)
    with plain.context_parallel(indices):
        pass
    # The context requires a buffer. This buffer has one element per chunk.
    chunks = functools.partial(torch.zeros, 2 * ranks, device=device)
    attend = functools.partial(sdpa, causal=batch.causal)
    return indices.cpu(), attend, lambda: plain.context_parallel(chunks())


# Name -> the factory, the module that the factory imports (or None), and the packages whose
# versions are recorded.
PEERS: dict[str, tuple[MakePeer, str | None, tuple[str, ...]]] = {
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


def make_peer(name: str, batch: PackedBatch, device: torch.device) -> Peer:
    if not batch.plain:
        raise ValueError("here it only computes batches of one document with a causal or full mask")
    return PEERS[name][0](batch, device)
