"""The contenders on a workload: one device, our strategies, and other libraries."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqpar.bench.workloads import peers
from seqpar.bench.workloads.masks import PackedBatch
from seqpar.bench.workloads.peers import Attend
from seqpar.comm.launch import mesh_of_all, on_a_host
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import attention_modules, make_attention

ONE = "one device"
ON_CONTIGUOUS = ("ulysses",)  # it exchanges tokens for heads, so every layout is balanced


@dataclass(frozen=True)
class Contender:
    """A contender on one rank."""

    indices: Tensor  # (T_local,) the batch's tokens on this rank
    heads: int  # the number of heads it computes
    kv_heads: int  # the number of KV heads it computes
    attend: Attend  # (q, k, v) -> out, differentiable
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)  # of a step
    sent_bytes: Callable[[], int] | None = None  # sent by this rank so far, if known


def divisor(ranks: int, kv_heads: int) -> int:
    """Return the number by which one device's heads are divided: the ranks, as far as possible."""
    return math.gcd(ranks, kv_heads)


def make(
    name: str, comm: Comm, batch: PackedBatch, heads: int, kv_heads: int, device: torch.device
) -> Contender:
    if name == ONE:
        part = divisor(comm.size, kv_heads)
        return one_device(batch, heads // part, kv_heads // part)
    if name in attention_modules():
        return _ours(name, comm, batch, heads, kv_heads, device)
    peer = peers.make(name, batch, device)
    return Contender(peer.indices, heads, kv_heads, peer.attend, peer.context)


def one_device(batch: PackedBatch, heads: int, kv_heads: int) -> Contender:
    """Return our kernel on one device: all tokens of some heads, without communication."""
    attention = make_attention("ring", Comm(ONE, 0, 1))
    return _on_layout(attention, Layout.contiguous(batch.cu_seqlens, 1), batch, heads, kv_heads)


def _ours(
    name: str, comm: Comm, batch: PackedBatch, heads: int, kv_heads: int, device: torch.device
) -> Contender:
    cut = Layout.contiguous if name in ON_CONTIGUOUS else Layout.zigzag
    group: Group = comm
    if "mesh" in inspect.signature(attention_modules()[name]).parameters:
        group = _mesh(device, grid(comm.size))
    attention = make_attention(name, group)
    return _on_layout(attention, cut(batch.cu_seqlens, comm.size), batch, heads, kv_heads)


def _on_layout(
    attention: Attention, layout: Layout, batch: PackedBatch, heads: int, kv_heads: int
) -> Contender:
    options = batch.options

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, layout, **options)

    indices = layout.token_indices(attention.rank)
    return Contender(indices, heads, kv_heads, attend, sent_bytes=lambda: int(attention.sent_bytes))


_mesh = functools.cache(mesh_of_all)  # groups are never destroyed, so create them once


def grid(ranks: int) -> tuple[int, int]:
    """Return a mesh of `ranks`: one row per host if hosts have several, otherwise nearly square."""
    local = on_a_host()
    if 1 < local < ranks and ranks % local == 0:
        return ranks // local, local
    inner = next(n for n in range(math.isqrt(ranks - 1) + 1, ranks + 1) if ranks % n == 0)
    return ranks // inner, inner
