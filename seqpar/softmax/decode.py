"""Decoding: attention of queries that all ranks have, over keys that are distributed over ranks.

Each rank computes attention of all queries over the keys that it holds. After that, all ranks
exchange their results (out, lse), and each rank merges the results of all ranks.

Letters of shapes: B is the batch, T the number of query tokens, Tkv_local the number of this rank's
keys, Hq and Hkv the numbers of query heads and KV heads, D the head dim of q and k, and Dv the head
dim of v.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import check_layouts, check_ranks_of
from seqpar.attention.operators import unit_stride, without_autocast
from seqpar.comm.agreement import Described
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import CuSeqlens, check_tensor, parse_cu_seqlens, shown
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Blocks
from seqpar.softmax.attend import attend_blocks
from seqpar.softmax.call import CallArguments, Operands, ResolvedCall
from seqpar.softmax.compute.partial import Partial
from seqpar.softmax.softmax_operator import AttentionOperator, Bound
from seqpar.softmax.wire.row_messages import Packing, RowFormat


def layout_of_queries(
    comm: Comm,
    q: Tensor,
    k_cache: Tensor,
    cu_seqlens: CuSeqlens | None,
    kv_layout: Layout,
    dealt: bool,
) -> Layout:
    """Return a layout of the queries of a call of `Attention.decode`. The layout is cached with
    `kv_layout`.

    If the arguments do not match each other, the function raises a ValueError that names an
    argument.

    Args:
        comm: the ranks that hold the keys.
        q, k_cache, cu_seqlens, kv_layout: as in `Attention.decode`. Without `cu_seqlens`, all
            documents have the same number of queries.
        dealt: if True, each rank holds the queries of some documents. If False, this rank holds all
            queries.
    """
    check_layouts(kv_layout=kv_layout)
    check_ranks_of(comm, kv_layout=kv_layout.geometry)
    check_tensor("q", q)
    check_tensor("k_cache", k_cache)
    rank, documents = comm.rank, kv_layout.documents
    held = kv_layout.tokens_on(rank)
    if k_cache.dim() not in (3, 4) or k_cache.shape[-3] != held:
        expected = f"the {held} tokens that kv_layout gives this rank, (…, {held}, Hkv, D)"
        raise ValueError(f"k_cache must have {expected}, got {tuple(k_cache.shape)}")
    if cu_seqlens is None:
        tokens = q.shape[-3] if q.dim() in (3, 4) else 0
        if not documents or tokens % documents:
            expected = f"the same number of tokens in each of kv_layout's {documents} documents"
            raise ValueError(f"q must have {expected} without cu_seqlens, got {tuple(q.shape)}")
        cu = np.arange(documents + 1) * (tokens // documents)
    else:
        cu = parse_cu_seqlens(cu_seqlens)
        if q.dim() not in (3, 4) or q.shape[-3] != cu[-1]:
            expected = f"the {cu[-1]} tokens of cu_seqlens, (…, {cu[-1]}, Hq, D)"
            raise ValueError(f"q must have {expected}, got {tuple(q.shape)}")
    lengths, kv_lengths = np.diff(cu), kv_layout.geometry.lengths
    if lengths.size != documents:
        expected = f"one entry more than kv_layout's {documents} documents"
        raise ValueError(f"cu_seqlens must have {expected}, got {cu.size}")
    if (lengths > kv_lengths).any():
        i = int(np.argmax(lengths > kv_lengths))
        expected = f"at least the {lengths[i]} tokens that q has in document {i}"
        raise ValueError(f"kv_layout must have {expected}, got {kv_lengths[i]}")

    def build() -> Layout:
        whole = [(i, 0, length) for i, length in enumerate(lengths.tolist()) if length]
        spans: list[list[tuple[int, int, int]]] = [[] for _ in range(kv_layout.ranks)]
        if dealt:
            spans = [whole[i :: kv_layout.ranks] for i in range(kv_layout.ranks)]
        else:
            spans[rank] = whole
        return Layout.from_spans(spans, cu)

    return kv_layout.geometry.derived(("queries", rank, dealt, cu.tobytes()), build)


def on_all_ranks(
    found: Tensor | tuple[Tensor, ...], layout: Layout, comm: Comm, dim: int
) -> Tensor | tuple[Tensor, ...]:
    """Gather the results of all queries on every rank.

    `found` contains the results of the queries that this rank holds. `dim` is their dimension of
    tokens.
    """
    if isinstance(found, Tensor):
        return layout.unshard(found, comm, dim)
    return tuple(layout.unshard(x, comm, dim) for x in found)


def refuse_gradients(**tensors: object) -> None:
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must require no gradient: decode has none; use torch.no_grad")


def unknown_layer(layer: object, known: Collection[object]) -> ValueError:
    names = shown(list(known)) if known else "none yet"
    way_out = "call put(layer, k, v) for each layer after the prefill"
    return ValueError(
        f"layer must be one that put has stored, {names}, got {shown(layer)}: {way_out}"
    )


class _Decode(AttentionOperator):
    """The operator that computes calls of `Attention.decode` for all strategies.

    All ranks have the same queries. On each rank, the layout of the queries says that this rank
    holds all of them, so the layouts of two ranks differ. To check that ranks make the same call,
    the lengths of documents are compared in place of the layouts.
    """

    name = "decode"

    def check(
        self, bound: Bound, call: ResolvedCall, tensors: Operands, arguments: CallArguments
    ) -> None:
        pass

    def agreed(
        self, bound: Bound, call: ResolvedCall, arguments: CallArguments, exact: bool
    ) -> Described:
        described = call.shape.described() | arguments.agreed(call.has_sinks, exact)
        del described["layout"]
        return described | {"cu_seqlens": call.layout.cu_seqlens.tolist()}


_DECODE = _Decode()


def attend_to_cache(bound: Bound, arguments: CallArguments, operands: Operands) -> list[Tensor]:
    """Compute attention of queries that all ranks have, over the keys of all ranks. Return [out,
    lse].

    In `operands`, q is (B, T, Hq, D). k (B, Tkv_local, Hkv, D) and v (B, Tkv_local, Hkv, Dv) are
    this rank's keys and values.
    """
    q, k, v, sinks = operands
    with bound.comm.turn(), without_autocast(q):
        call, comm = _DECODE.begin(bound, operands, arguments)
        bound.announce("decode")
        operands = Operands(unit_stride(q), unit_stride(k), unit_stride(v), sinks)
        return list(_attend_and_merge(comm, call, operands))


def _attend_and_merge(comm: Comm, call: ResolvedCall, operands: Operands) -> tuple[Tensor, Tensor]:
    """Attend to this rank's keys, exchange the results of all ranks, and merge them in rank order.

    The result has the same bits on all ranks.
    """
    q, k, v, sinks = operands
    # The query heads of one KV head become rows of one head, so that each key is read only once.
    # With ALiBi, this is impossible, because each head has a different slope.
    kv_heads = k.shape[2] if call.options.slopes is None else q.shape[2]
    group = q.shape[2] // kv_heads
    rows = by_kv_head(q, kv_heads)

    def plan() -> tuple[Blocks, Packing]:
        slices, dtype = call.slices(call.rank, call.rank), accumulator_dtype(q.dtype)
        repeated = replace(
            slices,
            q_rows=slices.q_rows * group,
            q_positions=slices.q_positions.repeat(group),
            q_aligned=slices.aligned.repeat(group),
            derived=Memo(),
        )
        formats = RowFormat((v.shape[3],), dtype), RowFormat((), dtype)
        sizes = rows.shape[0], rows.shape[1], rows.shape[2]
        return Blocks((repeated,)), Packing(sizes, formats)

    blocks, packing = call.once(("decode", group), plan)
    parts = [packing.empty(q.device) for _ in range(comm.size)]
    out, lse = parts[comm.rank][1]
    attend_blocks(rows, [(k, v)], blocks, call.options, None, (out, lse))
    sends = [(peer, parts[comm.rank][0]) for peer in comm.peers]
    recvs = [(peer, parts[peer][0]) for peer in comm.peers]
    comm.exchange(sends, recvs, label="decode").wait()
    total = Partial.nothing(rows, v)
    for _, (out, lse) in parts:
        total.merge(slice(None), out, lse)
    out, lse = (by_query_head(x, group) for x in (total.out, total.lse))
    return Partial.of(out, lse).finish(sinks, q.dtype)


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape queries (B, T, Hq, D) into (B, T·group, Hkv, D).

    `group` is the number of query heads per KV head. The query heads of a KV head become rows of
    this KV head.
    """
    return q.unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(1, 2)


def by_query_head(x: Tensor, group: int) -> Tensor:
    """Undo `by_kv_head`: reshape results (B, T·group, Hkv, …) into (B, T, Hq, …)."""
    return x.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3)
